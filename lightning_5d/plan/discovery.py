"""Finds the parts of a model that no plan was registered for.

Structure decides where it can (the largest list of equal layers, the embedding's vocabulary, the shapes inside an MLP); names
decide only between attention's four matrices. What is not recognised is refused for tensor parallelism, by name: a matrix split
the wrong way would train, silently, another model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from torch import nn

from lightning_5d.plan.plan import ParallelPlan

COLWISE_NAMES = {
    *("q_proj", "k_proj", "v_proj", "q", "k", "v", "wq", "wk", "wv", "query", "key", "value", "to_q", "to_k", "to_v"),
    *("q_lin", "k_lin", "v_lin", "query_proj", "key_proj", "value_proj", "linear_q", "linear_k", "linear_v"),
    *("gate_proj", "up_proj", "gate", "up", "w1", "w3", "fc1", "fc_1", "c_fc", "fc_in", "linear1", "dense_h_to_4h"),
}
ROWWISE_NAMES = {
    *("o_proj", "out_proj", "o", "wo", "dense", "to_out", "out", "output", "output_proj", "linear_out", "out_lin"),
    *("down_proj", "down", "w2", "fc2", "c_proj", "fc_out", "linear2", "dense_4h_to_h", "proj"),
}


def discover_plan(module: nn.Module) -> ParallelPlan | None:
    """A plan for ``module``, or None when it holds no list of layers."""
    layers_name = _find_layers(module)
    if layers_name is None:
        return None
    layers = module.get_submodule(layers_name)
    inside = {id(m) for m in layers.modules()}
    outside = [
        (n, m) for n, m in module.named_modules() if id(m) not in inside and next(m.parameters(recurse=False), None) is not None
    ]
    order = [id(m) for m in module.modules()]
    layers_position = order.index(id(layers))

    # The one that a projection leads back to: there may be more learned positions than tokens. Else the largest. A second model,
    # such as a teacher, may have its own: the nearest to the layers.
    projections = {(m.out_features, m.in_features) for _, m in outside if isinstance(m, nn.Linear)}
    embeddings = [(n, m) for n, m in outside if isinstance(m, nn.Embedding)]

    def rank(named: tuple[str, nn.Embedding]) -> tuple[bool, int, int]:
        leads_back = tuple(named[1].weight.shape) in projections
        return leads_back, -_distance(layers_name, named[0]) if leads_back else 0, named[1].num_embeddings

    embedding = max(embeddings, key=rank, default=None)
    head = None
    if embedding is not None:
        heads = [(n, m) for n, m in outside if isinstance(m, nn.Linear) and m.out_features == embedding[1].num_embeddings]
        head = min(reversed(heads), key=lambda named: _distance(layers_name, named[0]), default=None)
    first: list[str] = []
    last: list[str] = []
    for name, part in outside:
        holds_layers = any(inner is layers for inner in part.modules())  # its own parameters belong to no stage
        if holds_layers or (embedding and part is embedding[1]) or (head and part is head[1]):
            continue
        before = isinstance(part, nn.Embedding) or order.index(id(part)) < layers_position
        (first if before else last).append(name)
    norm = last.pop(0) if last else None

    hidden_size = embedding[1].embedding_dim if embedding else None
    layer = next(iter(layers.children()))
    colwise, rowwise, per_head, refusal = classify_layer(layer, hidden_size)
    num_heads, num_kv_heads = _head_counts(module, layer)
    return ParallelPlan(
        layers=layers_name,
        embedding=embedding[0] if embedding else None,
        norm=norm,
        head=head[0] if head else None,
        first_only=tuple(first),
        last_only=tuple(last),
        colwise=tuple(colwise),
        rowwise=tuple(rowwise),
        per_head=tuple(per_head),
        no_tensor_parallel=refusal,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )


def _distance(name: str, other: str) -> int:
    """Modules to leave and to enter between those that hold two parts."""
    path, other_path = name.split(".")[:-1], other.split(".")[:-1]
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, other_path, strict=False))))
    return len(path) + len(other_path) - 2 * shared


def _find_layers(module: nn.Module) -> str | None:
    best, best_size = None, (False, 0)
    for name, candidate in module.named_modules():
        if not isinstance(candidate, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(candidate.children())
        if not children or len({type(c) for c in children}) != 1 or isinstance(children[0], (nn.Linear, nn.Embedding)):
            continue
        parameters = list(candidate.parameters())
        size = any(p.requires_grad for p in parameters), sum(p.numel() for p in parameters)  # a teacher is frozen
        if size > best_size:
            best, best_size = name, size
    return best


def classify_layer(layer: nn.Module, hidden_size: int | None) -> tuple[list[str], list[str], list[str], str | None]:
    """``(colwise, rowwise, per_head, refusal)`` for one layer; ``refusal`` names what could not be placed."""
    groups: dict[str, list[tuple[str, nn.Linear]]] = defaultdict(list)
    others: list[tuple[str, nn.Module]] = []
    for name, part in layer.named_modules():
        if next(part.parameters(recurse=False), None) is None:
            continue
        if isinstance(part, nn.Linear):
            groups[name.rpartition(".")[0]].append((name, part))
        else:
            others.append((name, part))
    colwise: list[str] = []
    rowwise: list[str] = []
    unknown: list[str] = []
    hidden = hidden_size or _common_width(groups)
    for members in groups.values():
        for name, linear in members:
            leaf = name.rpartition(".")[2].lower()
            shape = (linear.in_features, linear.out_features)
            # A matrix that is not square shows its direction by its shape, unless several are fused into it.
            if leaf in COLWISE_NAMES and shape[0] == hidden:
                colwise.append(name)
            elif leaf in ROWWISE_NAMES and shape[1] == hidden:
                rowwise.append(name)
            elif shape[0] == hidden != shape[1] and _widths_agree(members, hidden):
                colwise.append(name)
            elif shape[1] == hidden != shape[0] and _widths_agree(members, hidden):
                rowwise.append(name)
            else:
                unknown.append(f"{name} {shape[0]}->{shape[1]}")
    parents = {name.rpartition(".")[0] for name in colwise + rowwise} - {""}
    per_head: list[str] = []
    for name, part in others:
        parent = name.rpartition(".")[0]
        in_block = parent in parents or any(parent.startswith(f"{p}.") for p in parents)
        widths = {p.shape for p in part.parameters(recurse=False)}
        if all(len(w) == 1 for w in widths):
            if not in_block:
                continue  # on the residual stream: whole on every rank
            width = next(iter(widths))[0]
            attention = dict(groups[parent]) if parent in groups else {}
            outputs = [linear.out_features for n, linear in attention.items() if n in colwise]
            if outputs and all(o % width == 0 and o > width for o in outputs):
                per_head.append(name)
                continue
        unknown.append(f"{name} ({type(part).__name__})")
    refusal = f"unknown how to split {', '.join(unknown)}" if unknown else None
    for parent, members in groups.items():
        names = {n for n, _ in members}
        if not refusal and not (names & set(rowwise) and names & set(colwise)):
            refusal = f"{parent or 'the layer'} has no pair of matrices that split by output and by input"
        refusal = refusal or _fused(members, colwise, rowwise)
    return colwise, rowwise, per_head, refusal


def _common_width(groups: dict[str, list[tuple[str, nn.Linear]]]) -> int | None:
    widths = [w for members in groups.values() for _, linear in members for w in (linear.in_features, linear.out_features)]
    return max(set(widths), key=widths.count) if widths else None


def _widths_agree(members: list[tuple[str, nn.Linear]], hidden: int | None) -> bool:
    """Whether the inner widths of an MLP agree: outputs of what enters equal the input of what leaves."""
    entering = {linear.out_features for _, linear in members if linear.in_features == hidden != linear.out_features}
    leaving = {linear.in_features for _, linear in members if linear.out_features == hidden != linear.in_features}
    square = any(linear.in_features == linear.out_features for _, linear in members)
    return len(entering) == 1 and entering == leaving and not square


def _fused(members: list[tuple[str, nn.Linear]], colwise: list[str], rowwise: list[str]) -> str | None:
    """A matrix that holds several (query, key and value; gate and up) cannot be split by rows."""
    inner = max((linear.in_features for n, linear in members if n in rowwise), default=0)
    for name, linear in members:
        if name in colwise and linear.out_features > inner:
            return f"{name} looks fused ({linear.out_features} outputs where {inner} are consumed)"
    return None


def _head_counts(module: nn.Module, layer: nn.Module) -> tuple[int | None, int | None]:
    """Numbers of heads, from a config or from an attention module's own attributes."""
    heads_names = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
    kv_names = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_query_groups", "kv_heads")

    def read(source: object, names: tuple[str, ...]) -> int | None:
        values = (getattr(source, name, None) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)

    configs = [getattr(m, "config", None) for m in module.modules()]
    sources = [*layer.modules(), *(c for c in configs if c is not None)]
    heads = next((h for s in sources if (h := read(s, heads_names)) is not None), None)
    kv_heads = next((h for s in sources if (h := read(s, kv_names)) is not None), None)
    return heads, kv_heads if kv_heads is not None else heads
