-- What an attempt's verdict is made of and no span can prove: the ledger that its runner read, and which proxies forwarded its calls.

ALTER TABLE attempts ADD COLUMN ledger TEXT;    -- types.AttemptLedger, JSON
ALTER TABLE attempts ADD COLUMN proxies TEXT;   -- {process marker: address}, JSON
