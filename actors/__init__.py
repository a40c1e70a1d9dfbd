"""Floor 2: who may be where, and who decides it. Imports anyio, the standard library and `forecasting` only."""
