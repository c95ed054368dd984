"""Measures what this machine's link, host memory and disk do."""

from cai_gemini.rates.disk import measure_disk
from cai_gemini.rates.link import measure

__all__ = ["measure", "measure_disk"]
