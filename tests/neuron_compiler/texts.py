# ruff: noqa: E501
"""StableHLO modules as text, so that the tests that use them need no jax."""

from __future__ import annotations

MLP = """
module @mlp attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<4x3xf32> {tf.aliasing_output = 0 : i32}, %arg1: tensor<5x4xf32>) -> (tensor<4x3xf32> {jax.result_info = "result[0]['w']"}, tensor<f32> {jax.result_info = "result[1]"}) {
    %c = stablehlo.constant dense<[0.1, 0.2, 0.30000001, -1.500000e+00, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5, 11.5, 12.5, 13.5, 14.5, 15.5, 16.5, 17.5]> : tensor<20xf32>
    %0 = stablehlo.reshape %c : (tensor<20xf32>) -> tensor<5x4xf32>
    %1 = stablehlo.add %arg1, %0 : tensor<5x4xf32>
    %2 = stablehlo.dot_general %1, %arg0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<5x4xf32>, tensor<4x3xf32>) -> tensor<5x3xf32>
    %3 = call @act(%2) : (tensor<5x3xf32>) -> tensor<5x3xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %4 = stablehlo.reduce(%3 init: %cst) applies stablehlo.add across dimensions = [0, 1] : (tensor<5x3xf32>, tensor<f32>) -> tensor<f32>
    %5 = stablehlo.dot_general %1, %3, contracting_dims = [0] x [0] : (tensor<5x4xf32>, tensor<5x3xf32>) -> tensor<4x3xf32>
    %6 = stablehlo.subtract %arg0, %5 : tensor<4x3xf32>
    return %6, %4 : tensor<4x3xf32>, tensor<f32>
  }
  func.func private @act(%arg0: tensor<5x3xf32>) -> tensor<5x3xf32> {
    %0 = stablehlo.tanh %arg0 : tensor<5x3xf32>
    return %0 : tensor<5x3xf32>
  }
}
"""

LOOP = """
module @loop {
  func.func public @main(%arg0: tensor<3xf32>, %arg1: tensor<i32>) -> tensor<3xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0:2 = stablehlo.while(%iterArg = %c, %iterArg_0 = %arg0) : tensor<i32>, tensor<3xf32>
    cond {
      %1 = stablehlo.compare LT, %iterArg, %arg1, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %1 = stablehlo.add %iterArg_0, %iterArg_0 : tensor<3xf32>
      %c_1 = stablehlo.constant dense<1> : tensor<i32>
      %2 = stablehlo.add %iterArg, %c_1 : tensor<i32>
      stablehlo.return %2, %1 : tensor<i32>, tensor<3xf32>
    }
    return %0#1 : tensor<3xf32>
  }
}
"""


def all_reduce(value: str, result: str, type_: str, op: str = "add") -> str:
    """The text of one all_reduce over two ranks."""
    element = type_.rsplit("x", 1)[-1].removeprefix("tensor<").rstrip(">")
    scalar = f"tensor<{element}>"
    return f"""
    {result} = "stablehlo.all_reduce"({value}) <{{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}}> ({{
    ^bb0(%a: {scalar}, %b: {scalar}):
      %s = stablehlo.{op} %a, %b : {scalar}
      stablehlo.return %s : {scalar}
    }}) : ({type_}) -> {type_}"""


def two_gradients() -> str:
    """Two independent all_reduces, then one that depends on them; and one of another type."""
    f, i = "tensor<8xf32>", "tensor<4xi32>"
    return f"""
module @grads attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32}} {{
  func.func public @main(%arg0: {f}, %arg1: {f}, %arg2: {i}) -> ({f}, {f}, {i}, {f}) {{
    %0 = stablehlo.multiply %arg0, %arg0 : {f}
    {all_reduce("%0", "%1", f)}
    %2 = stablehlo.negate %arg1 : {f}
    {all_reduce("%2", "%3", f)}
    {all_reduce("%arg2", "%4", i, "maximum")}
    %5 = stablehlo.add %1, %3 : {f}
    {all_reduce("%5", "%6", f)}
    return %1, %3, %4, %6 : {f}, {f}, {i}, {f}
  }}
}}
"""
