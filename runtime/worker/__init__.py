"""The other side of the ring: the one home of torch. Builds modules, binds weights, runs inferences."""
