"""LoRA adapters: what their folders hold (`folder`, `peft`, `tensors`), where they fit a model (`fitting`).

Reading needs no MLX and may run on any thread; `stacks` alone puts adapters on a device.
"""
