"""Which stages of a pipeline a rank has."""

from cai_apps.booster.places import StageManager as PipelineStageManager

__all__ = ["PipelineStageManager"]
