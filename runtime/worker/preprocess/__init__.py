"""Inputs that come as files: decoded, brought to shape and normalised once, shared by all models that declare it."""
