"""Reading StableHLO text: forms, types, and what is refused with which message."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from neuron_runtime.compiler.attrs import VerifyError
from neuron_runtime.compiler.importers.stablehlo import import_stablehlo
from neuron_runtime.compiler.ir import Op, program_from_json, program_to_json
from neuron_runtime.compiler.passes.simplify import simplify
from neuron_runtime.compiler.verify import verify_program
from neuron_runtime.errors import CompileError
from tests.neuron_compiler import texts
from tests.neuron_compiler.support import compile_text, function, run_one

F3 = "tensor<3xf32>"


def one(line: str, args: str = f"%arg0: {F3}", result: str = F3) -> str:
    return function(f"    %0 = {line}\n    return %0 : {result}", args, result)


def refused(text: str, code: str, *words: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_text(text)
    assert caught.value.code == code
    assert str(caught.value).startswith(f"[{code}] ")
    for word in words:
        assert word in str(caught.value)


def test_constants_of_all_forms() -> None:
    cases: list[tuple[str, str, Any]] = [
        ("dense<1.500000e+00>", "3xf32", np.full(3, 1.5, np.float32)),
        ("dense<0x7F800000>", "f32", np.float32(np.inf)),
        ("dense<[1, -2, 3]>", "3xi32", np.array([1, -2, 3], np.int32)),
        ("dense<[[true, false], [false, true]]>", "2x2xi1", np.eye(2, dtype=bool)),
        (
            'dense<"0x0000803F000000400000404000008040">',
            "2x2xf32",
            np.array([[1, 2], [3, 4]], np.float32),
        ),
        ('dense<"0x05">', "8xi1", np.array([1, 0, 1, 0, 0, 0, 0, 0], bool)),
        ("dense<0x3FC0>", "2xbf16", np.full(2, 1.5, np.float32)),
        ("dense<>", "0x4xf32", np.zeros((0, 4), np.float32)),
        ("dense<4294967295>", "ui32", np.uint32(2**32 - 1)),
        ("dense<[1.000000e+00, 0x7FC00000]>", "2xf32", np.array([1, np.nan], np.float32)),
    ]
    for dense, type_, expected in cases:
        line = f"stablehlo.constant {dense} : tensor<{type_}>"
        (found,) = run_one(compile_text(one(line, "", f"tensor<{type_}>")))
        np.testing.assert_array_equal(found.astype(expected.dtype), expected)
        assert found.shape == expected.shape


def test_generic_forms_are_read_too() -> None:
    body = f"""
    %0 = "stablehlo.add"(%arg0, %arg0) : ({F3}, {F3}) -> {F3} loc("here.py":1:2)
    %1 = "stablehlo.transpose"(%arg1) <{{permutation = array<i64: 1, 0>}}> : (tensor<2x3xf32>) -> tensor<3x2xf32>
    %2 = "stablehlo.dot_general"(%arg1, %1) <{{dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>}}> : (tensor<2x3xf32>, tensor<3x2xf32>) -> tensor<2x2xf32>
    %3 = "stablehlo.compare"(%arg0, %0) <{{comparison_direction = #stablehlo<comparison_direction LT>}}> : ({F3}, {F3}) -> tensor<3xi1>
    %4 = "stablehlo.slice"(%0) <{{start_indices = array<i64: 1>, limit_indices = array<i64: 3>, strides = array<i64: 1>}}> : ({F3}) -> tensor<2xf32>
    return %2, %3, %4 : tensor<2x2xf32>, tensor<3xi1>, tensor<2xf32>
    """  # noqa: E501
    text = function(
        body, f"%arg0: {F3}, %arg1: tensor<2x3xf32>", "tensor<2x2xf32>, tensor<3xi1>, tensor<2xf32>"
    )
    x = np.array([1, -2, 3], np.float32)
    m = np.arange(6, dtype=np.float32).reshape(2, 3)
    product, less, part = run_one(compile_text(text), x, m)
    np.testing.assert_allclose(product, m @ m.T)
    np.testing.assert_array_equal(less, x < 2 * x)
    np.testing.assert_array_equal(part, [-4, 6])


def test_unknown_operators_name_line_and_remedy() -> None:
    refused(
        one("stablehlo.convolution(%arg0) dim_numbers = [b, 0] : tensor<3xf32>"),
        "EUOC001",
        "line 3",
        "stablehlo.convolution",
        "--list-operators",
    )
    refused(one("chlo.top_k(%arg0, k = 2) : tensor<3xf32>"), "EUOC001", "chlo.top_k")
    call = f'stablehlo.custom_call @my_kernel(%arg0) {{backend_config = ""}} : ({F3}) -> {F3}'
    refused(one(call), "EUOC001", "line 3", "'my_kernel'")
    refused(one(call.replace("my_kernel", "Sharding")), "EVRF010", "jax.shard_map")


def test_wrong_text_names_the_line() -> None:
    refused("", "EIMP006", "no function @main")
    refused("hello world", "EIMP002", "line 1")
    refused("\x00\x01", "EIMP002", "not MLIR text")
    refused(texts.MLP[: len(texts.MLP) // 2], "EIMP002", "line")
    refused(one("stablehlo.add %arg0, %nope : tensor<3xf32>"), "EIMP002", "line 3", "%nope")
    refused(one("stablehlo.add %arg0 : tensor<3xf32>"), "EVRF001", "line 3", "takes 2 operands")
    refused(one("stablehlo.add %arg0, %arg0 : tensor<4xf32>"), "EVRF002", "float32[3]")
    refused(one("func.call @gone(%arg0) : (tensor<3xf32>) -> tensor<3xf32>"), "EIMP006", "@gone")
    refused(one("stablehlo.negate %arg0 : tensor<?xf32>"), "EIMP003", "dynamic")
    refused(one("stablehlo.negate %arg0 : tensor<3xcomplex<f32>>"), "EIMP003", "element type")
    refused(
        one("stablehlo.constant dense<[1.0, 2.0]> : tensor<3xf32>", ""), "EIMP004", "2 elements"
    )
    refused(one("stablehlo.constant dense_resource<abc> : tensor<3xf32>", ""), "EIMP004", "no data")


def test_recursive_calls_are_refused() -> None:
    text = """
module @m {
  func.func public @main(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = call @f(%arg0) : (tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @f(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = call @f(%arg0) : (tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
}
"""
    refused(text, "EIMP006", "nested too deep")


def test_reducers_other_than_the_known_ones_are_refused() -> None:
    text = texts.all_reduce("%arg0", "%0", F3, "subtract")
    refused(function(text + f"\n    return %0 : {F3}", f"%arg0: {F3}", F3), "EUOC001", "reducer")


def test_collective_in_a_branch_is_refused() -> None:
    inner = texts.all_reduce("%arg0", "%5", F3)
    body = f"""
    %0 = "stablehlo.case"(%arg1) ({{
      {inner}
      stablehlo.return %5 : {F3}
    }}, {{
      stablehlo.return %arg0 : {F3}
    }}) : (tensor<i32>) -> {F3}
    return %0 : {F3}
    """
    refused(function(body, f"%arg0: {F3}, %arg1: tensor<i32>", F3), "EVRF011", "all_reduce")


def test_too_large_for_the_device() -> None:
    big = "tensor<40000x40000x4xf32>"
    line = "stablehlo.negate %arg0 : " + big
    refused(one(line, f"%arg0: {big}", big), "EOOM001", "16384 MiB", "trn1")


def test_damaged_text_is_refused_or_read() -> None:
    """Characters and lines changed at random: a CompileError or a program, nothing else."""
    rng = random.Random(4)
    sources = [texts.MLP, texts.LOOP, texts.two_gradients()]
    words = ["%0", "tensor<3xf32>", "stablehlo.add", "{", "}", "(", ">", "dense<1>", "99", '"', "="]
    errors = 0
    for turn in range(600):
        text = sources[turn % 3]
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(text))
            kind = rng.random()
            if kind < 0.4:
                text = text[:at] + chr(rng.randrange(32, 127)) + text[at + 1 :]
            elif kind < 0.7:
                text = text[:at] + rng.choice(words) + text[at:]
            else:
                text = text[:at] + text[at + rng.randrange(1, 40) :]
        try:
            import_stablehlo(text)
        except CompileError:
            errors += 1
    assert errors > 400


# -- passes and verifier -----------------------------------------------------------------------


def test_passes_fold_merge_and_drop() -> None:
    body = f"""
    %c = stablehlo.constant dense<2.0> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> {F3}
    %1 = stablehlo.multiply %0, %0 : {F3}
    %2 = stablehlo.multiply %arg0, %1 : {F3}
    %3 = stablehlo.multiply %arg0, %1 : {F3}
    %4 = stablehlo.sine %arg0 : {F3}
    %cst = stablehlo.constant dense<1.0> : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> {F3}
    %6 = stablehlo.multiply %3, %5 : {F3}
    %7 = stablehlo.add %2, %6 : {F3}
    return %7 : {F3}
    """
    program = import_stablehlo(function(body, f"%arg0: {F3}", F3)).program
    simplify(program)
    verify_program(program)
    assert [op.name for op in program.body.ops] == ["constant", "multiply", "add"]
    assert program.body.ops[0].attrs["splat"] == np.float32(4).tobytes().hex()


def test_gradient_products_are_made_without_a_transposition() -> None:
    body = """
    %0 = stablehlo.dot_general %arg1, %arg0, contracting_dims = [0] x [0] : (tensor<5x3xf32>, tensor<5x4xf32>) -> tensor<3x4xf32>
    %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<3x4xf32>) -> tensor<4x3xf32>
    return %1 : tensor<4x3xf32>
    """  # noqa: E501
    text = function(body, "%arg0: tensor<5x4xf32>, %arg1: tensor<5x3xf32>", "tensor<4x3xf32>")
    neff = compile_text(text)
    assert [op.name for op in neff.program.body.ops] == ["dot_general"]
    x, dy = np.arange(20.0).reshape(5, 4), np.arange(15.0).reshape(5, 3)
    (found,) = run_one(neff, x.astype(np.float32), dy.astype(np.float32))
    np.testing.assert_allclose(found, x.T @ dy)


def test_program_survives_json() -> None:
    for text in (texts.MLP, texts.LOOP, texts.two_gradients()):
        program = import_stablehlo(text).program
        again = program_from_json(program_to_json(program), program.constants)
        assert again == program


def test_verifier_finds_broken_programs() -> None:
    def broken(change: Any) -> None:
        program = import_stablehlo(texts.LOOP).program
        change(program)
        with pytest.raises(VerifyError):
            verify_program(program)

    loop = 1
    broken(lambda p: p.body.ops.reverse())
    broken(lambda p: p.body.ops[loop].regions.pop())
    broken(lambda p: p.body.ops[loop].regions[1].results.reverse())
    broken(lambda p: p.body.ops[loop].regions[0].results.append(0))
    broken(lambda p: p.body.ops.append(Op("exec", [], [], {})))
    broken(lambda p: p.body.ops.append(p.body.ops[0]))
    broken(lambda p: p.body.results.append(999))
    broken(lambda p: p.types.pop())
