"""Emulated accelerators: all of vLLM is real, only the forward pass is replaced by its duration.

`plugin` registers the model class with vLLM, `worker` is the worker class to start engines with, `model_dir` writes the
directory that ``--model`` names. Everything else here is pure and knows neither vLLM nor torch.
"""
