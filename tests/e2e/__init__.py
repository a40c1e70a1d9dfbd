"""The whole server from outside: real processes, real HTTP, real weights where marked."""
