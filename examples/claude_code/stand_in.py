"""Replaces Claude Code if it is not installed: a loop over Anthropic's Messages API with the tools Read and Edit, streamed.

python stand_in.py MODEL PROMPT
"""

import pathlib
import sys

from anthropic import Anthropic

PATH = {"file_path": {"type": "string", "description": "absolute"}}
TOOLS = [
    {"name": "Read", "description": "Read a file.", "input_schema": {"type": "object", "properties": PATH, "required": ["file_path"]}},
    {
        "name": "Edit",
        "description": "Replace a text in a file.",
        "input_schema": {
            "type": "object",
            "properties": {**PATH, "old_string": {"type": "string"}, "new_string": {"type": "string"}},
            "required": ["file_path", "old_string", "new_string"],
        },
    },
]


def use(name: str, file_path: str, old_string: str = "", new_string: str = "") -> str:
    path = pathlib.Path(file_path)
    text = path.read_text()
    if name == "Read":
        return text
    if text.count(old_string) != 1:
        return "error: old_string must be in the file exactly once"
    path.write_text(text.replace(old_string, new_string))
    return "done"


def main(model: str, prompt: str) -> None:
    client, messages = Anthropic(), [{"role": "user", "content": prompt}]
    while True:
        asked = {"model": model, "max_tokens": 4096, "system": "You are a coding agent.", "tools": TOOLS, "messages": messages}
        with client.messages.stream(**asked) as stream:
            said = stream.get_final_message()
        used = [block for block in said.content if block.type == "tool_use"]
        if not used:
            print("".join(block.text for block in said.content if block.type == "text"))
            return
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": use(block.name, **block.input)} for block in used]
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]


if __name__ == "__main__":
    main(*sys.argv[1:])
