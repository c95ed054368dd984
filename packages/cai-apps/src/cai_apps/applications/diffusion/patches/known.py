"""Classes of layers that work on each row alone, or that are taught to ask their neighbours."""

KNOWN = frozenset(
    {
        *("AdaLayerNormContinuous", "AdaLayerNormZero", "Attention", "BasicTransformerBlock"),
        *("CombinedTimestepLabelEmbeddings", "CombinedTimestepTextProjEmbeddings", "Conv2d"),
        *(
            "CrossAttnDownBlock2D",
            "CrossAttnUpBlock2D",
            "DiTTransformer2DModel",
            "DownBlock2D",
            "Downsample2D",
        ),
        *("Dropout", "Embedding", "FeedForward", "GEGLU", "GELU", "GroupNorm", "Identity"),
        *("JointTransformerBlock", "LabelEmbedding", "LayerNorm", "Linear", "ModuleList", "PatchEmbed"),
        *("PixArtAlphaTextProjection", "RMSNorm", "ResnetBlock2D", "SD3Transformer2DModel", "SiLU"),
        *("TimestepEmbedding", "Timesteps", "Transformer2DModel", "UNet2DConditionModel"),
        *("UNetMidBlock2DCrossAttn", "UpBlock2D", "Upsample2D"),
    }
)
"""Names of classes of torch and diffusers; any other is refused, as nobody has looked at what it does with rows."""
