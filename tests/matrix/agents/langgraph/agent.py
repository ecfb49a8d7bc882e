"""A LangChain agent on LangGraph: invoked, streamed, async, a graph made by hand, and with its tool from an MCP server."""

import asyncio
import pathlib
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "shared"))
from population import population

SYSTEM = "Answer questions about cities."
SERVER = str(pathlib.Path(__file__).parent.parent / "shared" / "mcp_server.py")


def agent(tools=(population,), **options):
    return create_agent(ChatOpenAI(model="gpt-4.1", **options), list(tools), system_prompt=SYSTEM, name="city_agent")


def asked(question):
    return {"messages": [{"role": "user", "content": question}]}


def invoke(question):
    return agent().invoke(asked(question))["messages"][-1].content


def stream(question):
    text = ""
    for message, _ in agent(streaming=True).stream(asked(question), stream_mode="messages"):
        text = text + message.text if message.type == "AIMessageChunk" else ""
    return text


async def in_async(question):
    return (await agent().ainvoke(asked(question)))["messages"][-1].content


def responses(question):
    return agent(use_responses_api=True).invoke(asked(question))["messages"][-1].text


async def mcp(question):
    client = MultiServerMCPClient({"cities": {"command": sys.executable, "args": [SERVER], "transport": "stdio"}})
    return (await agent(await client.get_tools()).ainvoke(asked(question)))["messages"][-1].content


def graph(question):
    tools = [tool(population)]
    model = ChatOpenAI(model="gpt-4.1").bind_tools(tools)
    made = StateGraph(MessagesState)
    made.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    made.add_node("tools", ToolNode(tools))
    made.add_edge(START, "model")
    made.add_conditional_edges("model", tools_condition)
    made.add_edge("tools", "model")
    return made.compile().invoke(asked(question))["messages"][-1].content


if __name__ == "__main__":
    run = {"invoke": invoke, "stream": stream, "async": in_async, "responses": responses, "mcp": mcp, "graph": graph}
    answer = run[sys.argv[1]](sys.argv[2])
    print(asyncio.run(answer) if asyncio.iscoroutine(answer) else answer)
