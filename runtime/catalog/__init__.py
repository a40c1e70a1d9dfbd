"""What can be served: manifests, and the directories that hold them; never weights bytes, never torch."""
