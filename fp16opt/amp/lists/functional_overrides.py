"""The lists for ``torch.nn.functional``."""

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = [
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("conv_tbc", "linear", "prelu"),
]

FP32_FUNCS = [
    *("interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu"),
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss"),
    *("mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
    *("multi_margin_loss", "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "ctc_loss"),
]

CASTS = ["bilinear"]

BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "binary_cross_entropy needs FP32 input: after a sigmoid in FP16 probabilities near 0 and 1 are gone. Use "
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss), which takes what goes into the sigmoid; or call "
        "amp.register_float_function(torch, 'sigmoid') before amp.initialize; or pass input.float().",
    ),
]
