"""Floor 3, the world: HTTP, files, processes, torch, telemetry, command line. The floors below never import it."""
