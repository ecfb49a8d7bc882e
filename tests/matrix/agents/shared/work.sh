# Sourced by agent.sh with MODE and QUESTION: a folder with the files that it names, and a home without anybody's settings. Both are removed.
# Where its context is to be too small, the files are long.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME="$work/home" XDG_CONFIG_HOME="$work/home/.config" XDG_DATA_HOME="$work/home/.local/share"
export XDG_CACHE_HOME="$work/home/.cache" XDG_STATE_HOME="$work/home/.local/state"
mkdir -p "$work/files" "$HOME"
cd "$work/files" || exit 1
for city in $(grep -oE '\b[AB][0-9]+\b' <<<"$2" | sort -u); do
  people=0
  for ((at = 0; at < ${#city}; at++)); do people=$((people + 10 * $(printf %d "'${city:at:1}"))); done
  echo "$city has $people people" >"$city.txt"
  [ "$1" != compaction ] || printf '%08000d\n' 0 >>"$city.txt"
done
