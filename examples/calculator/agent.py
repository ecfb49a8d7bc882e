"""An ordinary agent: the OpenAI SDK and one tool, a calculator. It contains no code for training.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python agent.py "Tom has 3 boxes of 12 pens. How many pens?"
"""

import ast
import functools
import json
import operator
import os
import sys

from openai import OpenAI

MODEL = os.environ.get("OPENAI_MODEL", "policy")
INSTRUCTIONS = "Solve the problem with the calculator. End with a line `Answer: ` and the number alone."
MOST_CALLS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an expression with numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for example (3 + 4) * 12"}},
                "required": ["expression"],
            },
        },
    }
]
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


@functools.cache
def client() -> OpenAI:
    return OpenAI()


def solve(question: str) -> str:
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    for _ in range(MOST_CALLS):
        reply = client().chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)} for call in reply.tool_calls]
    return ""


def calculate(arguments: str) -> str:
    try:
        return f"{value(ast.parse(json.loads(arguments)['expression'], mode='eval').body):g}"
    except (ValueError, SyntaxError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.UnaryOp):
        return OPERATIONS[type(node.op)](value(node.operand))
    return OPERATIONS[type(node.op)](value(node.left), value(node.right))


if __name__ == "__main__":
    print(solve(sys.argv[1]))
