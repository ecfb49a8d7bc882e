"""A LangChain agent (on LangGraph) under OpenLLMetry's instrumentation of LangChain."""

import keep
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from opentelemetry.instrumentation.langchain import LangchainInstrumentor

keep.start()
LangchainInstrumentor().instrument()


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


agent = create_agent(ChatOpenAI(model="m"), [get_weather], system_prompt=keep.SYSTEM, name="weather_agent")
agent.invoke({"messages": [{"role": "user", "content": keep.QUESTION}]})
keep.write("langchain", "langchain-openai", "opentelemetry-instrumentation-langchain")
