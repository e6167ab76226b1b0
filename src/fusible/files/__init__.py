"""Files: the one way in which they are read, and the one in which they are written."""

from fusible.files.json_text import parse_json
from fusible.files.reading import read_file
from fusible.files.writing import locate, make_folder, replace_file, replace_files

__all__ = ["locate", "make_folder", "parse_json", "read_file", "replace_file", "replace_files"]
