"""What an error says about a framework that is not installed. The page `docs/pages/install.md` has the same command."""


def install_extra(extra: str) -> str:
    """How to install an extra, as a part of a sentence. The command needs no index of packages: it works from a clone
    and from a wheel."""
    source = "the source folder or the wheel of Halimede"
    return f"install the extra '{extra}': pip install 'PATH[{extra}]', where PATH is {source}"
