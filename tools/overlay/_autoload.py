"""What PyTorch calls at the end of ``import torch`` (entry-point group ``torch.backends``, 2.5 on).

Whatever goes wrong here must stay here: an exception would make ``import torch`` fail. So nothing of
torchpin is imported before the ``try``.
"""

import os
import sys
import warnings


def autoload() -> None:
    """Switches torchpin on, or says once why not. Never raises."""
    try:
        from torchpin import _overlay

        _overlay.enable()
    except Exception as error:
        reason = str(error)
        if type(error).__name__ != "ActivationError":
            reason = f"{type(error).__name__}: {reason}"
        _warn(f"torchpin stays off, stock PyTorch works as before: {reason}")


def _warn(message: str) -> None:
    """Warns at the line that imports torch; on stderr where a filter makes an error of warnings."""
    internal = [os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen "]
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "__file__", None):
        internal.append(os.path.dirname(str(torch.__file__)) + os.sep)
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(tuple(internal)):
        # warn() itself does not count the frames of the import system.
        level += not frame.f_code.co_filename.startswith("<frozen ")
        frame = frame.f_back
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=level)
    except Exception:
        print(f"RuntimeWarning: {message}", file=sys.stderr)
