"""Google's generateContent, streamGenerateContent, countTokens and models, by OpenAI's routes and /tokenize; no model server speaks them.

litellm's translation is not used: it gives parallel calls of one tool the same id, loses the usage of streams and all but the first part of
the system instruction, and ends a stream that broke off as if it were whole.
"""
