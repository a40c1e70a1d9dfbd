"""The fitting worker: one niced process per round of learning, and its jailer on this side."""
