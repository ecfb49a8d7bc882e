// What was said in an attempt: each model call with what was new in it, and the reply. Text only, whatever an agent wrote.
import { infiniteQueryOptions, keepPreviousData, useInfiniteQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { get, id, type Call, type Conversation as ConversationType, type Json as JsonValue } from "../api";
import { duration, number, short, visible } from "../text";
import { Empty, Problem, Text } from "./common";
import { Tokens } from "./span";

const STEP = 50;
type Message = { role?: string; content?: JsonValue; tool_calls?: JsonValue; name?: string; tool_call_id?: string };

/** How the pages of a conversation are asked for. */
export const conversationQuery = (rolloutId: string, attemptId: string) => infiniteQueryOptions({
  queryKey: ["conversation", rolloutId, attemptId], initialPageParam: 0,
  queryFn: ({ signal, pageParam }) => get<ConversationType>(`/rollouts/${id(rolloutId)}/conversation`, { attempt_id: attemptId, limit: STEP, offset: pageParam }, signal),
  getNextPageParam: (page, _, from) => page.calls.length > 0 && from + page.calls.length < page.total ? from + page.calls.length : undefined,
});

/** `tokens`: whether those of every call are shown at first. */
export function Conversation({ rolloutId, attemptId, live, tokens = false }: { rolloutId: string; attemptId: string; live: number | false; tokens?: boolean }) {
  const { data, error, isPending, hasNextPage, isFetchingNextPage, fetchNextPage } = useInfiniteQuery({
    ...conversationQuery(rolloutId, attemptId), refetchInterval: live, placeholderData: keepPreviousData,
  });
  const calls = useMemo(() => data?.pages.flatMap((page) => whole(page.calls)), [data]);
  if (isPending) return <div className="wait" />;
  const last = data?.pages[data.pages.length - 1];
  return (
    <div className="scroll talk">
      <Problem error={error} />
      {last && last.spans_left_out > 0 && <p className="note">The calls of the first spans: the latest {number(last.spans_left_out)} spans are not read for this page. <code>agl-otel export</code> and SQL read all.</p>}
      {calls?.length === 0 && <Empty>No model call of this attempt is stored.</Empty>}
      {calls?.map((call, place) => <OneCall key={`${call.trace_id}${call.span_id}`} call={call} number={place + 1} rolloutId={rolloutId} tokens={tokens} />)}
      {last && hasNextPage && <button disabled={isFetchingNextPage} onClick={() => void fetchNextPage()}>Show more of {number(last.total)} calls</button>}
    </div>
  );
}

// The calls of a page with their whole prompts: of all but the first it has what follows the `repeated` messages of the call before.
function whole(calls: Call[]): Call[] {
  const found: Call[] = [];
  for (const call of calls) {
    const before = found[found.length - 1];
    found.push(before ? { ...call, messages: [...[...before.messages, ...before.reply].slice(0, call.repeated), ...call.messages] } : call);
  }
  return found;
}

function OneCall({ call, number: place, rolloutId, tokens }: { call: Call; number: number; rolloutId: string; tokens: boolean }) {
  const [all, setAll] = useState(false);
  const shown = all ? call.messages : call.messages.slice(call.repeated);
  return (
    <section className="call" aria-label={`Call ${place}`}>
      <header>
        <b>{place}</b>
        <span>{visible(call.model || call.name)}</span>
        {call.agent && call.agent !== "*" && <span className="tag">{visible(call.agent)}</span>}
        <span className="dim">{duration(call.end_time - call.start_time)}</span>
        <span className="dim">{short(call.prompt_tokens)} + {short(call.response_tokens)} tokens</span>
        {call.tools.length > 0 && <span className="dim" title={call.tools.map((tool) => JSON.stringify(tool)).join("\n").slice(0, 3000)}>{call.tools.length} tools</span>}
      </header>
      {call.error && <p className="problem">{visible(call.error)}</p>}
      {call.repeated > 0 && <button className="earlier" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "hide" : "show"} {call.repeated} messages that were said before</button>}
      {shown.map((message, index) => <Said key={index} message={message as Message} />)}
      {call.reply.map((message, index) => <Said key={`r${index}`} message={message as Message} reply />)}
      {call.token_span_id && <Tokens key={String(tokens)} shown={tokens} rolloutId={rolloutId} attemptId={call.attempt_id} spanId={call.token_span_id} />}
    </section>
  );
}

function Said({ message, reply }: { message: Message; reply?: boolean }) {
  const role = typeof message?.role === "string" ? message.role : "?";
  const kind = ["system", "developer", "user", "assistant", "tool"].includes(role) ? role : "other";
  const calls = Array.isArray(message?.tool_calls) ? message.tool_calls : [];
  return (
    <div className={`said ${kind} ${reply ? "reply" : ""}`}>
      <span className="role">{visible(role)}{message?.name ? <small>{visible(String(message.name))}</small> : null}</span>
      <div className="body">
        {parts(message?.content).map((part, place) => <Text key={place} text={part} />)}
        {calls.map((call, place) => <ToolCall key={place} call={call} />)}
      </div>
    </div>
  );
}

function ToolCall({ call }: { call: JsonValue }) {
  const asked = (call as { function?: { name?: JsonValue; arguments?: JsonValue } } | null)?.function;
  const given = asked?.arguments;
  let text = typeof given === "string" ? given : JSON.stringify(given ?? call, null, 2);
  try {
    text = JSON.stringify(JSON.parse(text), null, 1);
  } catch { /* what a model wrote need not be JSON */ }
  return <div className="toolcall"><b>{visible(String(asked?.name ?? "call"))}</b><Text text={text} mono /></div>;
}

function parts(content: JsonValue | undefined): string[] {
  if (content === null || content === undefined) return [];
  if (typeof content === "string") return [content];
  if (!Array.isArray(content)) return [JSON.stringify(content, null, 2)];
  return content.map((part) => {
    if (typeof part === "string") return part;
    const held = part as { type?: string; text?: JsonValue; content?: JsonValue } | null;
    if (typeof held?.text === "string") return held.text;
    if (typeof held?.content === "string") return held.content;
    if (held?.type?.includes("image")) return `[${held.type}: not loaded] ${JSON.stringify(part).slice(0, 200)}`;
    return JSON.stringify(part, null, 2);
  });
}
