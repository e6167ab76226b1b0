"""Reading and writing files. All of Fusible does it here, in one way."""

from fusible.files.json_text import parse_json
from fusible.files.reading import read_file
from fusible.files.writing import Replacement, locate, make_folder, refused, replace_file, replace_files

__all__ = ["Replacement", "locate", "make_folder", "parse_json", "read_file", "refused", "replace_file", "replace_files"]
