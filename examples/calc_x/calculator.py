"""A calculator as an MCP server over stdio."""

import ast
import operator

from mcp.server.mcpserver import MCPServer

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> str:
    """The value of an expression with numbers, + - * / and parentheses.

    Args:
        expression: for example (3 + 4) * 12
    """
    try:
        return f"{value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, KeyError, AttributeError, TypeError, ZeroDivisionError) as error:
        return f"error: cannot calculate {expression!r}: {type(error).__name__}: {error}"


def value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.UnaryOp):
        return OPERATIONS[type(node.op)](value(node.operand))
    return OPERATIONS[type(node.op)](value(node.left), value(node.right))


if __name__ == "__main__":
    server.run("stdio")
