"""The tool as an MCP server over stdio."""

import pathlib
import sys

try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # mcp 2
    from mcp.server.mcpserver import MCPServer as FastMCP

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from population import population

server = FastMCP("cities")
server.tool()(population)
server.run("stdio")
