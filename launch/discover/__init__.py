"""The only readers of a machine: everything behind them works on frozen values."""
