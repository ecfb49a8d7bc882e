-- What the calls of a judge under a version of a rubric took: of a call whose end is not stored the most that it might have.
SELECT count() AS Calls, sum(Took.1) AS PromptTokens, sum(Took.2) AS AnswerTokens
FROM (
  SELECT LogAttributes[{judge_call:String}] AS Call, argMax((toUInt64OrZero(LogAttributes[{judge_prompt_tokens:String}]),
    toUInt64OrZero(LogAttributes[{judge_answer_tokens:String}])), LogAttributes[{judge_ended:String}]) AS Took
  FROM otel.otel_logs
  PREWHERE RolloutId = ''
  WHERE EventName = {judge_event:String} AND Call != '' AND LogAttributes[{source:String}] = {judge:String}
    AND LogAttributes[{rubric_name:String}] = {rubric:String}
  GROUP BY Call
)
