"""Reading and writing files. All of Fusible does it here, in one way."""

from fusible.files.json_text import parse_json
from fusible.files.reading import map_file, read_file
from fusible.files.writing import (
    NewFolder,
    Replacement,
    held,
    locate,
    make_folder,
    put,
    refused,
    replace_file,
    replace_files,
    replace_folder,
    replaced,
)

__all__ = [
    "NewFolder",
    "Replacement",
    "held",
    "locate",
    "make_folder",
    "map_file",
    "parse_json",
    "put",
    "read_file",
    "refused",
    "replace_file",
    "replace_files",
    "replace_folder",
    "replaced",
]
