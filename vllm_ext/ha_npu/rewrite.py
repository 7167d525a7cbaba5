"""GEMM-first (paper, section 5): rewrites of an operator graph that take products out from behind the inversion.

Four rules, applied until none fits. None knows an operator by name.

    (T Y) S                      = T (Y S)                    associate
    T X - T Y                    = T (X - Y)                  factor
    diag(c) X S                  = diag(c) (X S)              commute_scale
    diag(b) diag(a) X            = diag(a b) X                merge_scales

For the delta rule they turn V' = T diag(beta) V - (T diag(beta) diag(exp G) K) S into V' = T (diag(beta) V - diag(beta
exp G) (K S)): the product W is gone, and K S no longer waits for the inversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from vllm_ext.ha_npu.graph import Graph, Node, Tensor, with_nodes

State = tuple[dict[str, Node], dict[str, Tensor]]
Rule = Callable[[Graph], State | None]


def _after_solve(graph: Graph, name: str) -> bool:
    """Whether a tensor depends on the inversion."""
    node = graph.nodes.get(name)
    return node is not None and (node.kind == "solve" or any(_after_solve(graph, source) for source in node.inputs))


def _plain_product(graph: Graph, name: str) -> Node | None:
    node = graph.nodes.get(name)
    return node if node is not None and node.kind == "matmul" and not node.transpose[0] else None


def _fresh(graph: Graph, stem: str) -> str:
    name, count = stem, 1
    while name in graph.tensors:
        count += 1
        name = f"{stem}{count}"
    return name


def _copy(graph: Graph) -> State:
    return dict(graph.nodes), dict(graph.tensors)


def associate(graph: Graph) -> State | None:
    """(T Y) S to T (Y S), when T waits for the inversion and Y does not, and the product T Y has no other reader."""
    for outer in graph.nodes.values():
        if outer.kind != "matmul" or outer.transpose[0]:
            continue
        inner = _plain_product(graph, outer.inputs[0])
        if inner is None or inner.transpose[1] or len(graph.consumers[inner.name]) > 1:
            continue
        if not _after_solve(graph, inner.inputs[0]) or _after_solve(graph, inner.inputs[1]):
            continue
        nodes, tensors = _copy(graph)
        product = _fresh(graph, f"{inner.inputs[1]}_{outer.inputs[1]}")
        nodes[product] = replace(outer, name=product, inputs=(inner.inputs[1], outer.inputs[1]))
        tensors[product] = replace(graph.tensors[outer.name], name=product, dtype="fp32")
        nodes[outer.name] = replace(outer, inputs=(inner.inputs[0], product), transpose=(False, False))
        return nodes, tensors
    return None


def factor(graph: Graph) -> State | None:
    """T X - T Y to T (X - Y)."""
    for node in graph.nodes.values():
        if node.kind != "sub":
            continue
        left, right = (_plain_product(graph, name) for name in node.inputs)
        if left is None or right is None or left.transpose[1] or right.transpose[1]:
            continue
        if left.inputs[0] != right.inputs[0] or any(len(graph.consumers[p.name]) > 1 for p in (left, right)):
            continue
        nodes, tensors = _copy(graph)
        rest = _fresh(graph, "r")
        nodes[rest] = replace(node, name=rest, inputs=(left.inputs[1], right.inputs[1]))
        tensors[rest] = replace(graph.tensors[node.name], name=rest, dtype="fp32")
        nodes[node.name] = replace(node, kind="matmul", inputs=(left.inputs[0], rest))
        return nodes, tensors
    return None


def commute_scale(graph: Graph) -> State | None:
    """(diag(c) X) S to diag(c) (X S): the operand X serves every product that wants it, scaled or not."""
    for product in graph.nodes.values():
        if product.kind != "matmul" or product.transpose[0]:
            continue
        scaled = graph.nodes.get(product.inputs[0])
        if scaled is None or scaled.kind != "row_scale":
            continue
        nodes, tensors = _copy(graph)
        plain = _fresh(graph, f"{scaled.inputs[0]}_{product.inputs[1]}")
        nodes[plain] = replace(product, name=plain, inputs=(scaled.inputs[0], product.inputs[1]))
        tensors[plain] = replace(graph.tensors[product.name], name=plain, dtype="fp32")
        nodes[product.name] = replace(
            product, kind="row_scale", inputs=(plain, scaled.inputs[1]), transpose=(False, False)
        )
        return nodes, tensors
    return None


def merge_scales(graph: Graph) -> State | None:
    """diag(b) (diag(a) X) to diag(a b) X: one pass over the tile instead of two."""
    for outer in graph.nodes.values():
        inner = graph.nodes.get(outer.inputs[0])
        if outer.kind != "row_scale" or inner is None or inner.kind != "row_scale":
            continue
        if len(graph.consumers[inner.name]) > 1:
            continue
        nodes, tensors = _copy(graph)
        first, second = inner.inputs[1], outer.inputs[1]
        scale = _fresh(graph, f"{first}_{second}")
        nodes[scale] = Node(scale, "mul", (first, second), 1)
        tensors[scale] = replace(graph.tensors[first], name=scale, role="temp")
        nodes[outer.name] = replace(outer, inputs=(inner.inputs[0], scale))
        return nodes, tensors
    return None


RULES: Mapping[str, Rule] = {
    "associate": associate,
    "factor": factor,
    "commute_scale": commute_scale,
    "merge_scales": merge_scales,
}


def gemm_first(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """Apply the rules until none fits. Returns the equivalent graph and the names of the rules applied, in order."""
    applied: list[str] = []
    changed = True
    while changed:
        changed = False
        for name, rule in RULES.items():
            result = rule(graph)
            if result is not None:
                nodes, tensors = result
                graph = with_nodes(graph, nodes.values(), tensors)
                applied.append(name)
                changed = True
                break
    return graph, tuple(applied)
