"""Credentials for stores, read from a directory in the form of a mounted Secret, or from the environment."""

import os
from collections.abc import Mapping
from pathlib import Path

from halimede.fetch.errors import FetchError, cause_of
from halimede_spec.fetch_exit import FetchExit

KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "GOOGLE_APPLICATION_CREDENTIALS_JSON",
    "AZURE_STORAGE_ACCOUNT",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "USERNAME",
    "PASSWORD",
    "TOKEN",
)
_PUBLIC = frozenset({"AWS_REGION", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT"})
"""Keys with values that may be shown; all other values must not be, including user names."""

_SECRET_VARIABLES = (
    *(key for key in KEYS[:-3] if key not in _PUBLIC),
    "AZURE_CLIENT_SECRET",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)
MAX_BYTES = 1 << 16


def read_credentials(folder: str) -> dict[str, str]:
    """The values of the known keys, by key; AUTH if the directory is missing or contains none of them."""
    found: dict[str, str] = {}
    try:
        for key in KEYS:
            path = Path(folder, key)
            if path.is_file():
                with path.open("rb") as file:
                    # Editors end a file with a newline.
                    found[key] = file.read(MAX_BYTES).decode().strip()
        if not found:
            text = f"the credentials in {folder} have none of the keys {', '.join(KEYS)}"
            raise FetchError(
                FetchExit.AUTH, text if os.path.isdir(folder) else f"the credentials' folder {folder} does not exist"
            )
    except UnicodeDecodeError:
        raise FetchError(FetchExit.AUTH, f"the credentials in {folder} are not UTF-8") from None
    except OSError as error:
        raise FetchError(FetchExit.AUTH, f"the credentials in {folder} cannot be read: {cause_of(error)}") from None
    return found


def has_credentials(folder: str) -> bool:
    """Whether the directory has any files. The kubelet uses names with a leading dot for itself."""
    return os.path.isdir(folder) and any(not name.startswith(".") for name in os.listdir(folder))


def secret_values(credentials: Mapping[str, str]) -> list[str]:
    return [value for key, value in credentials.items() if key not in _PUBLIC]


def secrets_of_environment(environment: Mapping[str, str]) -> list[str]:
    return [environment[key] for key in _SECRET_VARIABLES if environment.get(key)]
