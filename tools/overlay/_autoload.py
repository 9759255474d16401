"""What PyTorch calls at the end of ``import torch`` (entry-point group ``torch.backends``, 2.5 on).

Whatever goes wrong here must stay here: an exception would make ``import torch`` fail. So nothing is
imported before the ``try``.
"""


def autoload() -> None:
    """Switches torchpin on, or says once why not. Never raises."""
    try:
        from torchpin import _overlay

        _overlay.activate_at_import()
    except Exception as error:
        import warnings

        warnings.warn(
            f"torchpin stays off, stock PyTorch works as before: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
