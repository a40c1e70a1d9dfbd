"""What runs models that come as a file with their graph in it; `engine.py` beside it runs modules that we build."""
