"""A config of DeepSpeed in cai's words: `python -m cai_apps.compat.deepspeed ds_config.json`."""

from cai_apps.compat.deepspeed.conversion import Converted, converted

__all__ = ["Converted", "converted"]
