"""The PyTorch backend: TorchScript, programs of torch.export, AOTInductor packages, and modules in Python."""

from halimede.backends.pytorch.backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
