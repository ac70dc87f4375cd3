"""The order of the arguments is the interface: their number, some places, and what has no place."""

from transformer_engine_torch.calls import BackwardCall, ForwardCall


def test_the_places_of_arguments() -> None:
    assert len(ForwardCall._fields) == 30
    assert len(BackwardCall._fields) == 28
    places = {"qkv_layout": 6, "bottom_right_diagonal": 11, "Q": 14, "Bias": 24, "cuda_graph": 29}
    assert {name: ForwardCall._fields.index(name) for name in places} == places
    places = {"qkv_layout": 5, "deterministic": 11, "Q": 14, "dO": 18, "Aux_CTX_Tensors": 21}
    assert {name: BackwardCall._fields.index(name) for name in places} == places


def test_each_direction_takes_arguments_of_the_other() -> None:
    assert ForwardCall.deterministic is False
    assert BackwardCall.is_training is True
    assert BackwardCall.page_table_k is None
