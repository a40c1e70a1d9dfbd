"""Every setting there is: its name, type, default and one sentence. Values only.

No file access, no environment, no default that depends on the machine. Sections check themselves (`checks.py`);
`configs/reference.yaml` shows all of it and a test keeps the two equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, model_validator

from runtime.config import checks
from runtime.config.foresight import Forecast
from runtime.config.preload import Preload, PreloadItem
from runtime.config.remote import Remote
from runtime.config.units import GIB, KIB, MIB, Amount, Bytes, Count, Flag, Ratio, Seconds
from runtime.config.yaml import Frozen

Name: TypeAlias = Annotated[str, AfterValidator(checks.name)]
Version: TypeAlias = Annotated[str, AfterValidator(checks.version)]
DeviceId: TypeAlias = Annotated[str, AfterValidator(checks.device_id)]
Module: TypeAlias = Annotated[str, AfterValidator(checks.module)]
Url: TypeAlias = Annotated[str, AfterValidator(checks.url)]
HostName: TypeAlias = Annotated[str, AfterValidator(checks.host_name)]
TrustedHost: TypeAlias = Annotated[str, AfterValidator(checks.trusted_host)]
Folder: TypeAlias = Annotated[Path, BeforeValidator(checks.folder)]
Positive: TypeAlias = Annotated[int, Strict(), Field(ge=1)]
SomeBytes: TypeAlias = Annotated[Bytes, Field(ge=1)]
SomeSeconds: TypeAlias = Annotated[Seconds, Field(gt=0)]


class Key(Frozen):
    """A bearer key, kept as a hash. `foreload key NAME` makes one."""

    name: Name
    """What logs call it."""
    hash: Annotated[str, AfterValidator(checks.key_hash)]
    """`sha256:` and the hexadecimal hash of the key."""
    scopes: Annotated[tuple[Annotated[str, AfterValidator(checks.scope)], ...], Field(min_length=1)] = ("infer",)
    """What it may do: `infer`, `infer:<glob of model names>`, `read`, `admin`."""


class Limits(Frozen):
    """What one request or connection may cost."""

    body: SomeBytes = 64 * MIB
    """Largest request body, on the wire and again after decompression."""
    headers: SomeBytes = 32 * KIB
    """Largest header section of a request."""
    header_count: Positive = 100
    """Most header fields in a request."""
    url: SomeBytes = 8 * KIB
    """Longest path and query of a request."""
    json_depth: Annotated[Positive, Field(le=512)] = 64
    """Deepest nesting of arrays and objects in a JSON body."""
    chunks: Positive = 65_536
    """Most chunks in a chunked body."""
    body_idle: SomeSeconds = 30.0
    """How long a body may make no progress before the request is refused."""
    header_idle: SomeSeconds = 10.0
    """How long a connection may take to send its header section."""
    response: SomeBytes = 64 * MIB
    """Largest answer of a model."""
    waiters: Positive = 10_000
    """Most requests that may wait for models at one time, over all models."""
    waiters_per_model: Positive = 2_000
    """Most requests that may wait for one model at one time."""
    compared: Annotated[Positive, Field(le=1_024)] = 16
    """Most models that one comparison may ask."""
    connections: Positive = 4_096
    """Most open connections; further ones are refused."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.limits(self)
        return self


class Wait(Frozen):
    """How long a request waits for a cold model."""

    soft: SomeSeconds = 60.0
    """After this the request is answered 503 with Retry-After, while the load goes on."""
    default_deadline: SomeSeconds | None = None
    """Deadline of requests that bring none of their own; null for none."""


class Drain(Frozen):
    """How the server stops."""

    delay: Seconds = 5.0
    """How long new requests are still served after the stop signal, while balancers notice."""
    timeout: Seconds = 20.0
    """How long leases are then waited for before they are given up."""


class Server(Frozen):
    """The HTTP front."""

    host: HostName = "127.0.0.1"
    """Address to listen on; any but a loopback address needs `keys` or `insecure: true`."""
    port: Annotated[int, Strict(), Field(ge=0, le=65_535)] = 8080
    """TCP port to listen on; 0 takes a free one."""
    keys: Annotated[tuple[Key, ...], AfterValidator(checks.keys)] = ()
    """Bearer keys; with any listed, a request must show one that covers what it asks for."""
    insecure: Flag = False
    """Permits listening beyond this machine without keys, for a network that something else protects."""
    trusted_hosts: tuple[TrustedHost, ...] = ("localhost", "127.0.0.1", "[::1]")
    """Host header values that are answered; `*` answers all, `*.example.org` a domain."""
    limits: Limits = Limits()
    """What one request or connection may cost."""
    wait: Wait = Wait()
    """How long a request waits for a cold model."""
    drain: Drain = Drain()
    """How the server stops."""
    model_ready: Literal["loadable", "resident"] = "loadable"
    """Whether a cold model that can be loaded on demand counts as ready."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.server(self)
        return self


class Device(Frozen):
    """A device that models run on; one worker process each."""

    id: DeviceId
    """`cpu:` and any number, each a worker of its own on the CPU, or `cuda:` and the number of the GPU."""
    memory: Amount = Amount(share=0.5)
    """Memory that models may take on the device, as a size or a share of what it has."""
    headroom: Bytes = 0
    """Part of that memory which stays free."""
    count: Positive | None = None
    """Most models resident at one time; null for as many as fit."""
    isolation: Literal["process", "thread"] = "process"
    """Where models run; `thread` is for debugging and embedding, where a crash takes the server along."""
    start: Literal["auto", "zygote", "spawn", "standby"] = "auto"
    """How worker processes start: `zygote` forks, `spawn` execs, `standby` keeps one waiting; `auto` forks on a CPU."""
    threads: Positive | None = None
    """Compute threads of the worker; null leaves the choice to it."""
    pinned: Bytes = 1 << 30
    """Page-locked memory of a GPU's worker, from which weights go up fastest; without meaning on a CPU."""
    slots: Annotated[Positive, Field(le=4096)] = 64
    """Calls that may be under way in the worker at one time."""
    loads_in_parallel: Annotated[Positive, Field(le=64)] = 4
    """Loads that may be under way on the device at one time."""
    load_timeout: SomeSeconds = 300.0
    """How long one load may take before it is given up."""
    allow: tuple[Module, ...] = ()
    """Python modules whose functions may build models; one that ends in a dot stands for all below it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.headroom(self.memory, self.headroom)
        checks.start(self)
        return self


class Pressure(Frozen):
    """When the host's memory counts as short."""

    high: Ratio = 0.85
    """Share of memory in use at which idle models are let go."""
    low: Ratio = 0.80
    """Share of memory in use below which that ends."""
    interval: Annotated[Seconds, Field(ge=0.01)] = 1.0
    """Time between two readings."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.pressure(self)
        return self


class Host(Frozen):
    """The host tier: weights in this machine's memory."""

    memory: Amount = Amount(share=0.5)
    """Memory that weights may take, as a size or a share of the machine's."""
    headroom: Bytes = 0
    """Part of that memory which stays free."""
    mlock: Flag = False
    """Locks weights into memory so that the system cannot page them out."""
    mlock_limit: Amount | None = None
    """Most memory that is locked, as a size or a share of the machine's; null: as much as the system permits."""
    pressure: Pressure = Pressure()
    """When the host's memory counts as short."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.headroom(self.memory, self.headroom)
        return self


class Disk(Frozen):
    """The disk tier: foreload's own cache of weights."""

    model_config = ConfigDict(revalidate_instances="always")  # or a section left out keeps a path that starts nowhere

    path: Folder = Path("cache")
    """Folder of the cache; a relative one starts at this file's folder."""
    size: SomeBytes = 100 * GIB
    """Space that the cache may take."""
    artefacts: SomeBytes = 5 * GIB
    """Space that compiled code may take, in a folder of its own beside the weights."""
    loads_in_parallel: Annotated[Positive, Field(le=64)] = 1
    """Models that are brought into the cache at one time."""
    skeletons: Flag = True
    """Keeps modules without weights in the cache, so that a restarted worker builds none."""
    slabs: Flag = True
    """Lays a loaded model's weights anew in the order of their use, with checksums, where there is room to spare."""


class Preprocess(Frozen):
    """What inputs that come as images and sounds may cost each device worker, which decodes them."""

    cache: Bytes = 256 * MIB
    """Memory for decoded inputs, shared by all models that declare the same steps; 0 keeps none."""
    result: SomeBytes = 256 * MIB
    """Largest tensor that one input may become."""
    pixels: Annotated[Positive, Field(le=89_478_485)] = 50_000_000
    """Most pixels of an image, as it comes and once it is resized."""
    samples: Annotated[Positive, Field(le=1 << 30)] = 32_000_000
    """Most samples of a sound over all channels, as it comes, at the model's rate, and in its windows."""
    threads: Annotated[Positive, Field(le=64)] = 2
    """Threads that decode beside the one that runs models."""


class Backoff(Frozen):
    """How long a model that failed to load is left alone."""

    first: SomeSeconds = 1.0
    """After the first failure; doubles with each further one."""
    limit: SomeSeconds = 300.0
    """Longest time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.backoff(self)
        return self


class UnknownNames(Frozen):
    """The memory for names that no model has, so that asking for them stays cheap."""

    ttl: Seconds = 2.0
    """How long a name is remembered as unknown."""
    size: Count = 1024
    """Most names remembered."""


class Policy(Frozen):
    """Who stays resident and who leaves. Models may override the durations."""

    name: Literal["lru", "lru_ttl", "rate", "ttn"] = "lru"
    """`lru`: least recently used leaves first; `lru_ttl`: also after `ttl_idle`; `rate`, `ttn`: by expected use."""
    ttl_idle: SomeSeconds | None = None
    """Idle time after which a resident leaves; null for never."""
    ttl: SomeSeconds | None = None
    """Time since its load after which a resident is loaded anew; null for never."""
    min_residency: Seconds = 0.0
    """Time since its load during which a resident is not evicted for another."""
    victims_per_load: Positive = 16
    """Most residents that may be evicted for one load."""
    fairness: Seconds = 1.0
    """How long requests for residents may go ahead of a waiting load that needs their place."""
    finish_orphan_loads: Flag = False
    """Whether a load goes on when everyone who waited for it has left."""
    backoff: Backoff = Backoff()
    """How long a model that failed to load is left alone."""
    unknown_names: UnknownNames = UnknownNames()
    """The memory for names that no model has."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.policy(self)
        return self


class Declared(Frozen):
    """Bytes that a model needs, where the measured ones shall not be used."""

    device: SomeBytes
    """Bytes on the device, workspace included."""
    host: SomeBytes
    """Bytes in the host's memory."""


class ModelEntry(Frozen):
    """A model that is served."""

    name: Name
    """Name in URLs."""
    version: Version = "1"
    """Version in URLs; text, so write it in quotes."""
    source: Folder
    """Folder that holds the model's manifest and files."""
    pinned: Flag = False
    """Keeps the model resident once it is loaded."""
    priority: Annotated[int, Strict(), Field(ge=-1000, le=1000)] = 0
    """Of two models that could leave, the one with the lower number does."""
    ttl_idle: SomeSeconds | None = None
    """Overrides `policy.ttl_idle` for this model."""
    ttl: SomeSeconds | None = None
    """Overrides `policy.ttl` for this model."""
    footprint: Declared | None = None
    """Overrides the size computed from the manifest."""


class WarmEntry(Frozen):
    """A model that is loaded at start."""

    model: Annotated[str, AfterValidator(checks.name_at_version)]
    """Its name, or `name@version`."""
    required: Flag = True
    """Whether the server is not ready until the model is resident."""


WarmItem: TypeAlias = Annotated[WarmEntry, BeforeValidator(checks.warm_entry, json_schema_input_type=str | WarmEntry)]


class Log(Frozen):
    """Log lines, on standard output."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""
    format: Literal["json", "pretty", "auto"] = "auto"
    """One JSON object per line, or coloured text; `auto` chooses text on a terminal."""


class Telemetry(Frozen):
    """What is told to the outside."""

    otlp: Url | None = None
    """OTLP/HTTP collector that spans are sent to; null sends none."""
    log: Log = Log()
    """Log lines, on standard output."""
    access_log: Flag = False
    """Writes a log line per request."""
    trace_url: Annotated[str, AfterValidator(checks.trace_url)] | None = None
    """Address of a trace in your trace viewer, with `{trace_id}` in it."""


class Config(Frozen):
    """The configuration of one server."""

    server: Server = Server()
    """The HTTP front."""
    devices: Annotated[tuple[Device, ...], AfterValidator(checks.devices)] = (Device(id="cpu:0"),)
    """Devices that models run on."""
    host: Host = Host()
    """The host tier: weights in this machine's memory."""
    disk: Disk = Disk()
    """The disk tier: foreload's own cache of weights."""
    preprocess: Preprocess = Preprocess()
    """What inputs that come as images and sounds may cost each device worker, which decodes them."""
    remote: Remote = Remote()
    """Where model files may come from besides folders. Nothing is allowed by default."""
    policy: Policy = Policy()
    """Who stays resident and who leaves."""
    repository: tuple[Folder, ...] = ()
    """Folders that are searched for model folders."""
    models: Annotated[tuple[ModelEntry, ...], AfterValidator(checks.models)] = ()
    """Models that are served, beside those of the repository; settings here win over the repository's."""
    trust: tuple[Annotated[str, AfterValidator(checks.name_at_version)], ...] = ()
    """Models whose files may run code, by name or name@version; their manifests must say `trust: code` too."""
    warm: tuple[WarmItem, ...] | None = None
    """Models loaded at start, in order; `[]` says that none is wanted, null that nobody said."""
    forecast: Forecast = Forecast()
    """Learned rates: what models are loaded ahead for without anybody declaring it."""
    preload: PreloadItem = Preload()
    """What is loaded ahead of requests."""
    telemetry: Telemetry = Telemetry()
    """What is told to the outside."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.whole(self)
        return self
