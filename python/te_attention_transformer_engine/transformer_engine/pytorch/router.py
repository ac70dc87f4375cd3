"""TransformerEngine's routers of experts: their names, which refuse when they are called."""

from transformer_engine.pytorch._layers import function

fused_topk_with_score_function = function("router.fused_topk_with_score_function")
fused_compute_score_for_moe_aux_loss = function("router.fused_compute_score_for_moe_aux_loss")
fused_moe_aux_loss = function("router.fused_moe_aux_loss")
