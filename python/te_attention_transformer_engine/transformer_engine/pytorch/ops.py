"""TransformerEngine's fusible operations: their names, which refuse when one is created."""

from transformer_engine.pytorch._layers import layer

FusibleOperation = layer("ops.FusibleOperation")
Sequential = layer("ops.Sequential")
BasicLinear = layer("ops.BasicLinear")
Bias = layer("ops.Bias")
LayerNorm = layer("ops.LayerNorm")
RMSNorm = layer("ops.RMSNorm")
AllReduce = layer("ops.AllReduce")
ReduceScatter = layer("ops.ReduceScatter")
GELU = layer("ops.GELU")
GEGLU = layer("ops.GEGLU")
ReLU = layer("ops.ReLU")
ReGLU = layer("ops.ReGLU")
SiLU = layer("ops.SiLU")
SwiGLU = layer("ops.SwiGLU")
