//! The names that rows depend on. Python gives them, so that each stands in one place.

use aho_corasick::AhoCorasick;

pub struct Names {
    /// Keys of the rollout id, the attempt id and the sequence number.
    pub ids: [Vec<u8>; 3],
    /// Names of the spans that open and seal an attempt.
    pub attempt: Vec<u8>,
    pub seal: Vec<u8>,
    /// Keys of the prompt's ids, the response's ids and its log-probs.
    pub tokens: [Vec<u8>; 3],
    /// Keys in the column Facts, and the prefix of others.
    pub facts: Keys,
    pub fact_prefix: Vec<u8>,
    /// The key of the messages whose text is searched for what HasMedia stands for.
    pub messages: Vec<u8>,
    pub media: AhoCorasick,
    pub service: Vec<u8>,
}

/// A set of keys: most attributes differ from all of them in length.
pub struct Keys(Vec<Vec<Vec<u8>>>);

impl Keys {
    pub fn new(keys: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let mut by_length: Vec<Vec<Vec<u8>>> = Vec::new();
        for key in keys {
            if by_length.len() <= key.len() {
                by_length.resize(key.len() + 1, Vec::new());
            }
            by_length[key.len()].push(key);
        }
        Keys(by_length)
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        self.0.get(key.len()).is_some_and(|some| some.iter().any(|each| each == key))
    }
}

impl Names {
    pub fn is_fact(&self, key: &[u8]) -> bool {
        self.facts.contains(key) || key.starts_with(&self.fact_prefix)
    }

    /// The place of a token key: 0, 1 or 2.
    pub fn token(&self, key: &[u8]) -> Option<usize> {
        self.tokens.iter().position(|each| each == key)
    }
}
