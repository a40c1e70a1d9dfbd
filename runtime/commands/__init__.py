"""What the command line does, apart from its words: talking to a server, showing answers. It decides nothing."""
