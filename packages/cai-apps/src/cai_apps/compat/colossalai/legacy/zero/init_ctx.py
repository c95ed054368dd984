"""The context in which a model is made for ZeRO, under its second path."""

from cai_apps.compat.colossalai.zero import ZeroInitContext

__all__ = ["ZeroInitContext"]
