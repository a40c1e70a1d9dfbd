"""Asks /livez of the server in this container; exit code 0 if it says yes, 1 with one line if not.

For the image's HEALTHCHECK: standard library only. With `server.keys` set, give any key in FORELOAD_KEY.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT = 4.0


def main() -> int:
    """Ask once. `FORELOAD_SERVER__PORT` as the server reads it, 8080 without it."""
    port = os.environ.get("FORELOAD_SERVER__PORT", "8080")
    key = os.environ.get("FORELOAD_KEY", "")
    request = urllib.request.Request(f"http://127.0.0.1:{port}/livez")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would look for the server on itself
    try:
        with opener.open(request, timeout=TIMEOUT):
            return 0
    except urllib.error.HTTPError as error:
        said = f"/livez answers {error.code}"
        error.close()
    except (OSError, ValueError) as error:
        said = f"no answer from /livez: {type(error).__name__}"
    print(said, file=sys.stderr)  # Docker keeps it for `docker inspect`
    return 1


if __name__ == "__main__":
    sys.exit(main())
