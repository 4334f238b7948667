"""Callbacks: what a run achieves, measured and named."""

from lightning_5d.callbacks.mfu import MFUMonitor

__all__ = ["MFUMonitor"]
