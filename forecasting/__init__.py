"""Floor 1: what will be wanted, and when. Imports numpy, scipy, statsmodels and calendar libraries only."""

from forecasting.outlook import UNKNOWN, Outlook, Prospect

__all__ = ["UNKNOWN", "Outlook", "Prospect"]
