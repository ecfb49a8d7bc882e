"""A SQL agent on LangGraph: write a query, run it, check it, and rewrite it if the check finds an error.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python agent.py concerts "How many singers are there?"
"""

import functools
import os
import re
import sqlite3
import sys
from typing import TypedDict

from databases import rows, schema
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

MAX_TURNS = 3
APPROVED = "THE QUERY IS CORRECT."
WRITE = "You write one SQLite query that answers the question. Reply with the query alone.\n\nTables:\n{schema}"
CHECK = f"You check a SQLite query against the question and what it gave. Name its mistakes, or end with: {APPROVED}\n\nTables:\n{{schema}}"
REWRITE = "You write the SQLite query anew so that the mistakes are gone. Reply with the query alone.\n\nTables:\n{schema}"


class State(TypedDict, total=False):
    database: str
    question: str
    query: str
    result: str
    feedback: str
    turns: int


@functools.cache
def model() -> ChatOpenAI:
    return ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "policy"))


def ask(state: State, instructions: str, text: str) -> str:
    system = SystemMessage(instructions.format(schema=schema(state["database"])))
    return model().invoke([system, HumanMessage(text)]).text


def only_query(reply: str) -> str:
    """Remove a code fence around the query."""
    fenced = re.search(r"```(?:sql)?\s*(.*?)```", reply, re.DOTALL)
    return (fenced[1] if fenced else reply).strip()


def write(state: State) -> State:
    return {"query": only_query(ask(state, WRITE, f"Question: {state['question']}")), "turns": 1}


def execute(state: State) -> State:
    try:
        return {"result": str(rows(state["database"], state["query"]))}
    except sqlite3.Error as error:
        return {"result": f"error: {error}"}


def tried(state: State) -> str:
    return f"Question: {state['question']}\nQuery: {state['query']}\nResult: {state['result']}"


def check(state: State) -> State:
    return {"feedback": ask(state, CHECK, tried(state))}


def rewrite(state: State) -> State:
    text = f"{tried(state)}\nMistakes: {state['feedback']}"
    return {"query": only_query(ask(state, REWRITE, text)), "turns": state["turns"] + 1}


def after_check(state: State) -> str:
    return END if state["feedback"].strip().endswith(APPROVED) or state["turns"] >= MAX_TURNS else "rewrite"


def graph():
    made = StateGraph(State)
    for node in (write, execute, check, rewrite):
        made.add_node(node.__name__, node)
    made.add_edge(START, "write")
    made.add_edge("write", "execute")
    made.add_edge("execute", "check")
    made.add_conditional_edges("check", after_check, ["rewrite", END])
    made.add_edge("rewrite", "execute")
    return made.compile()


if __name__ == "__main__":
    database, question = sys.argv[1:]
    print(graph().invoke({"database": database, "question": question})["query"])
