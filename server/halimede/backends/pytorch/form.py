"""What a model file of PyTorch is. Pure."""

from enum import Enum


class Form(Enum):
    """The value completes the sentence "this model is …"."""

    SCRIPT = "a TorchScript file"
    EXPORTED = "a program of torch.export"
    PACKAGE = "an AOTInductor package"
    MODULE = "a module written in Python"
