"""Parser of modules, functions, regions and operations (generic and pretty forms)."""

from __future__ import annotations

from typing import Any

from neuron_runtime.compiler.importers.mlir_text import (
    Cursor,
    RawFunc,
    RawModule,
    RawOp,
    RawRegion,
    tokenize,
)
from neuron_runtime.errors import CompileError

_MAX_DEPTH = 64


def parse_module(text: str) -> RawModule:
    """Parse a whole module. Raises CompileError EIMP00x with the line."""
    cursor = Cursor(tokenize(text))
    module = RawModule()
    wrapped = False
    if cursor.accept("module"):
        wrapped = True
        if cursor.token.kind == "symbol":
            module.name = cursor.next().text[1:].strip('"')
        if cursor.accept("attributes"):
            cursor.expect("{")
            module.attrs = cursor.attr_dict("}")
        cursor.expect("{")
    while not (cursor.peek("}") if wrapped else cursor.token.kind == "end"):
        _top_level(cursor, module)
    if wrapped:
        cursor.expect("}")
        cursor.skip_location()
    return module


def _top_level(cursor: Cursor, module: RawModule) -> None:
    if cursor.accept("func.func"):
        func = _func(cursor)
        module.funcs[func.name] = func
    elif cursor.accept("sdy.mesh"):
        name = cursor.expect_kind("symbol").text
        cursor.expect("=")
        module.meshes[name] = _mesh(cursor)
    elif cursor.token.kind == "hash":  # an attribute alias: #loc = loc(...)
        cursor.next()
        cursor.expect("=")
        if cursor.peek("loc"):
            cursor.skip_location()
        else:
            cursor.attr_value()
    else:
        cursor.fail("a function (func.func)")


def _mesh(cursor: Cursor) -> list[tuple[str, int]]:
    """``<["x"=4, "y"=2]> {...}``"""
    cursor.expect("<")
    cursor.expect("[")
    axes: list[tuple[str, int]] = []
    while not cursor.accept("]"):
        name = cursor.expect_kind("string").text.strip('"')
        cursor.expect("=")
        axes.append((name, int(cursor.expect_kind("number").text)))
        cursor.accept(",")
    while not cursor.accept(">"):
        cursor.next()
    if cursor.peek("{"):
        cursor.skip_balanced()
    cursor.skip_location()
    return axes


def _func(cursor: Cursor) -> RawFunc:
    line = cursor.token.line
    if cursor.peek("public") or cursor.peek("private"):
        cursor.next()
    name = cursor.expect_kind("symbol").text
    args, arg_attrs = [], []
    cursor.expect("(")
    while not cursor.accept(")"):
        value = cursor.expect_kind("value").text
        cursor.expect(":")
        args.append((value, cursor.type()))
        arg_attrs.append(cursor.attr_dict("}") if cursor.accept("{") else {})
        cursor.skip_location()
        cursor.accept(",")
    types, attrs = [], []
    if cursor.accept("->"):
        if cursor.accept("("):
            while not cursor.accept(")"):
                types.append(cursor.type())
                attrs.append(cursor.attr_dict("}") if cursor.accept("{") else {})
                cursor.accept(",")
        else:
            types, attrs = [cursor.type()], [{}]
    if cursor.accept("attributes"):
        cursor.expect("{")
        cursor.attr_dict("}")
    cursor.expect("{")
    ops = _ops(cursor, 0)
    cursor.skip_location()
    return RawFunc(name, line, RawRegion(args, ops), arg_attrs, types, attrs)


def _ops(cursor: Cursor, depth: int) -> list[RawOp]:
    """Operations up to and including the closing brace."""
    if depth > _MAX_DEPTH:
        cursor.fail(f"regions nested less than {_MAX_DEPTH} deep")
    ops: list[RawOp] = []
    while not cursor.accept("}"):
        ops.append(_op(cursor, depth))
    return ops


def _region(cursor: Cursor, depth: int) -> RawRegion:
    """``{ ^bb0(%a: t, %b: t): ops }`` or ``{ ops }``."""
    cursor.expect("{")
    args = []
    if cursor.token.kind == "block":
        cursor.next()
        if cursor.peek("("):
            args = _block_args(cursor)
        cursor.expect(":")
    return RawRegion(args, _ops(cursor, depth + 1))


def _block_args(cursor: Cursor) -> list[tuple[str, Any]]:
    cursor.expect("(")
    args = []
    while not cursor.accept(")"):
        value = cursor.expect_kind("value").text
        cursor.expect(":")
        args.append((value, cursor.type()))
        cursor.skip_location()
        cursor.accept(",")
    return args


def _op(cursor: Cursor, depth: int) -> RawOp:
    results: list[tuple[str, int]] = []
    while cursor.token.kind == "value":
        name = cursor.next().text
        count = 1
        if cursor.accept(":"):
            count = int(cursor.expect_kind("number").text)
        results.append((name, count))
        if not cursor.accept(","):
            cursor.expect("=")
            break
    token = cursor.next()
    if token.kind not in ("ident", "string"):
        cursor.at -= 1
        cursor.fail("an operation")
    op = RawOp(token.text.strip('"'), token.line, results)
    if token.kind == "string":
        _generic(cursor, op, depth)
    elif op.name in _SPECIAL:
        _SPECIAL[op.name](cursor, op, depth)
    else:
        _pretty(cursor, op)
        cursor.signature(op)
    cursor.skip_location()
    return op


def _operands(cursor: Cursor, op: RawOp) -> None:
    cursor.expect("(")
    while not cursor.accept(")"):
        op.operands.append(cursor.expect_kind("value").text)
        cursor.accept(",")


def _generic(cursor: Cursor, op: RawOp, depth: int) -> None:
    """``"dialect.op"(%a, %b) <{props}> ({region}, {region}) {attrs} : (t, t) -> t``"""
    _operands(cursor, op)
    if cursor.accept("<{"):
        op.attrs.update(cursor.attr_dict("}>"))
    if cursor.accept("("):
        while not cursor.accept(")"):
            op.regions.append(_region(cursor, depth))
            cursor.accept(",")
    if cursor.accept("{"):
        op.attrs.update(cursor.attr_dict("}"))
    cursor.signature(op)


def _pretty(cursor: Cursor, op: RawOp) -> None:
    """Operands, words, ``key = value`` pairs and brackets up to the type."""
    open_parens = 0
    while open_parens or not cursor.peek(":"):
        token = cursor.token
        if token.kind == "value":
            op.operands.append(cursor.next().text)
        elif token.kind == "symbol":
            op.symbol = cursor.next().text
        elif token.kind == "dense":
            op.attrs["value"] = cursor.attr_value()
            op.out_types = [op.attrs["value"].type] if op.attrs["value"].type else []
            return
        elif token.kind == "ident" and cursor.tokens[cursor.at + 1].text == "=":
            _keyword(cursor, op)
        elif token.kind == "ident":
            if token.text in ("return", "func.return") or token.line != op.line:
                return  # an operation without a type, e.g. `return`
            op.words.append(cursor.next().text)
        elif token.text == "(":
            open_parens += 1
            cursor.next()
        elif token.text == ")" and open_parens:
            open_parens -= 1
            cursor.next()
        elif token.text == "[":
            op.attrs["slice"] = _slice_bounds(cursor)
        elif token.text == "{":
            cursor.next()
            op.attrs.update(cursor.attr_dict("}"))
        elif token.text == "}":
            return
        elif not cursor.accept(","):
            cursor.fail(f"an operand or attribute of {op.name}")


def _keyword(cursor: Cursor, op: RawOp) -> None:
    """``dims = [0, 1]`` or ``contracting_dims = [2] x [0]``."""
    key = cursor.next().text
    cursor.expect("=")
    value = cursor.attr_value()
    if cursor.accept("x"):
        value = (value, cursor.attr_value())
    op.attrs[key] = value


def _slice_bounds(cursor: Cursor) -> list[list[int]]:
    """``[0:8, 0:128:2]`` as [start, limit, stride] triples."""
    cursor.expect("[")
    bounds = []
    while not cursor.accept("]"):
        parts = [int(cursor.expect_kind("number").text)]
        while cursor.accept(":"):
            parts.append(int(cursor.expect_kind("number").text))
        bounds.append([*parts, 1][:3])
        cursor.accept(",")
    return bounds


def _while(cursor: Cursor, op: RawOp, depth: int) -> None:
    """``stablehlo.while(%a = %x, %b = %y) : t, t cond {...} do {...}``"""
    names = []
    cursor.expect("(")
    while not cursor.accept(")"):
        names.append(cursor.expect_kind("value").text)
        cursor.expect("=")
        op.operands.append(cursor.expect_kind("value").text)
        cursor.accept(",")
    cursor.signature(op)
    if cursor.accept("attributes"):
        cursor.expect("{")
        cursor.attr_dict("}")
    if len(names) != len(op.in_types):
        raise CompileError("EIMP002", f"line {op.line}: while has values without types")
    args = list(zip(names, op.in_types, strict=True))
    for word in ("cond", "do"):
        cursor.expect(word)
        cursor.expect("{")
        op.regions.append(RawRegion(args, _ops(cursor, depth + 1)))


def _reduce(cursor: Cursor, op: RawOp, depth: int) -> None:
    """``reduce(%x init: %c) applies stablehlo.add across dimensions = [1] : ...`` or a reducer."""
    inits = []
    cursor.expect("(")
    while True:
        op.operands.append(cursor.expect_kind("value").text)
        cursor.expect("init")
        cursor.expect(":")
        inits.append(cursor.expect_kind("value").text)
        cursor.expect(")")
        cursor.accept(",")
        if not cursor.accept("("):
            break
    op.operands.extend(inits)
    if cursor.accept("applies"):
        op.attrs["applies"] = cursor.expect_kind("ident").text
    cursor.expect("across")
    cursor.expect("dimensions")
    cursor.expect("=")
    op.attrs["dimensions"] = cursor.attr_value()
    if cursor.accept("{"):
        op.attrs.update(cursor.attr_dict("}"))
    cursor.signature(op)
    if cursor.accept("reducer"):
        pairs = []
        while cursor.peek("("):
            pairs.append(_block_args(cursor))
        cursor.skip_location()
        cursor.expect("{")
        if any(len(pair) != 2 for pair in pairs):
            cursor.fail("reducer arguments in pairs")
        args = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        op.regions.append(RawRegion(args, _ops(cursor, depth + 1)))


def _manual_computation(cursor: Cursor, op: RawOp, depth: int) -> None:
    """``sdy.manual_computation(%a) in_shardings=[..] out_shardings=[..] manual_axes={..} (..)``"""
    _operands(cursor, op)
    for key in ("in_shardings", "out_shardings"):
        cursor.expect(key)
        cursor.expect("=")
        cursor.expect("[")
        shardings = []
        while not cursor.accept("]"):
            shardings.append(_sharding(cursor))
            cursor.accept(",")
        op.attrs[key] = shardings
    cursor.expect("manual_axes")
    cursor.expect("=")
    cursor.expect("{")
    axes = []
    while not cursor.accept("}"):
        axes.append(cursor.expect_kind("string").text.strip('"'))
        cursor.accept(",")
    op.attrs["manual_axes"] = axes
    args = _block_args(cursor)
    cursor.expect("{")
    op.regions.append(RawRegion(args, _ops(cursor, depth + 1)))
    cursor.signature(op)


def _sharding(cursor: Cursor) -> tuple[str, list[list[str]]]:
    """``<@mesh, [{"x"}, {}], replicated={"y"}>``: mesh and the axes of each dimension."""
    cursor.expect("<")
    mesh = cursor.expect_kind("symbol").text
    cursor.expect(",")
    cursor.expect("[")
    dims = []
    while not cursor.accept("]"):
        cursor.expect("{")
        axes = []
        while not cursor.accept("}"):
            token = cursor.next()
            if token.kind == "string":
                axes.append(token.text.strip('"'))
            elif token.text == ":":
                cursor.fail("whole mesh axes (a dimension split over part of an axis)")
            elif token.text not in (",", "?"):
                cursor.at -= 1
                cursor.fail("a mesh axis")
        if cursor.token.kind == "ident":  # priority, p0
            cursor.next()
        dims.append(axes)
        cursor.accept(",")
    while not cursor.accept(">"):
        if cursor.peek("{"):
            cursor.skip_balanced()
        else:
            cursor.next()
    return mesh, dims


_SPECIAL = {
    "stablehlo.while": _while,
    "stablehlo.reduce": _reduce,
    "sdy.manual_computation": _manual_computation,
}
