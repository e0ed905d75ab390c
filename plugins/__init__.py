"""The custom op ``dflash::GroupedDynamicConv``: one definition, and its forms per engine.

    grouped_dynamic_conv.py   what it computes, its names and the checks of its arguments
    torch_op.py               the PyTorch op, and its translation for `torch.onnx.export`
    onnx_function.py          the ONNX function body that plain engines run
    triton_kernel.py          the CUDA kernel
    triton_launch.py          the kernel called with PyTorch tensors
    triton_compile.py         the kernel as PTX, for GPUs that need not be present
    tensorrt_plugin.py        the TensorRT plugin that has the PTX put into the engine

Importing this package loads none of torch, onnx or triton.
"""
