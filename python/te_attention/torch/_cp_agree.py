"""Whether all ranks of a group make the same call, before the first transfer of it."""

import json
from collections import defaultdict
from datetime import timedelta

import torch.distributed as dist

from te_attention.torch._bounded import keep

OPEN = ("one row of bias",)  # fields that a rank may leave to the others
MOST = 4096  # signatures that are kept
PATIENCE = 10.0  # seconds that a rank waits for the others to call
ERROR = "error"
_calls: dict[str, int] = defaultdict(int)  # by group
_agreed: dict[str, dict[str, dict]] = defaultdict(dict)  # signatures, by group


class DisagreementError(RuntimeError):
    """Ranks called with different arguments, or not at all: which rank, what it has, the need."""


def _name(group: dist.ProcessGroup) -> str:
    return group.group_name


def agree(group: dist.ProcessGroup, fields: dict[str, object], always: bool) -> dict[str, str]:
    """Raises DisagreementError on every rank unless all of them call with equal fields.

    `always`: for each call; else only for fields that this group has not agreed on yet. A field
    that is None somewhere takes the value of the other ranks. Returns all fields as text.
    """
    name, text = _name(group), json.dumps({k: str(v) for k, v in fields.items()})
    if not always and text in _agreed[name]:
        return _agreed[name][text]
    calls = [json.loads(value) for value in _share(group, text)]
    for rank, call in enumerate(calls):
        if ERROR in call:
            raise DisagreementError(f"rank {rank} raised: {call[ERROR]} (call {_calls[name]})")
    settled = {}
    for key in calls[0]:
        known = [r for r, c in enumerate(calls) if key not in OPEN or c[key] != "None"]
        first = known[0] if known else 0
        value = calls[first][key]
        for rank in known:
            call = calls[rank]
            if call[key] != value:
                raise DisagreementError(
                    f"rank {rank} called with {key}={call[key]}; needs {value} as rank {first} "
                    f"(call {_calls[name]})"
                )
        settled[key] = value
    return keep(_agreed[name], text, settled, MOST)


def report_error(group: dist.ProcessGroup, error: BaseException) -> None:
    """Tells the other ranks, which wait for this one's call, that it raised before."""
    if dist.get_world_size(group) > 1:
        _post(group, json.dumps({ERROR: f"{type(error).__name__}: {error}"}))


def _key(call: int, rank: int) -> str:
    return f"te_attention_cp/{call}/{rank}"


def _post(group: dist.ProcessGroup, text: str) -> int:
    name, rank = _name(group), dist.get_rank(group)
    _calls[name] += 1
    call = _calls[name]
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set(_key(call, rank), text)
    if call > 2:
        store.delete_key(_key(call - 2, rank))
    return call


def _share(group: dist.ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks."""
    call, rank = _post(group, text), dist.get_rank(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    out = []
    for other in range(dist.get_world_size(group)):
        if other == rank:
            out.append(text)
            continue
        try:
            store.wait([_key(call, other)], timedelta(seconds=PATIENCE))
            out.append(store.get(_key(call, other)).decode())
        except (RuntimeError, dist.DistError) as error:
            raise DisagreementError(
                f"rank {other} has not called within {PATIENCE:g} s; needs the call of rank {rank} "
                f"(call {call})"
            ) from error
    return out
