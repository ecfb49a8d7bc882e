package agentlightningextension

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	journalFiles  = 3 // of half of maxRemembered each, or of ten minutes
	journalSuffix = ".resends"
)

// answered is a line of the journal, after the line's checksum: a request that was answered.
type answered struct {
	key     requestKey
	at      time.Time
	outcome outcome
}

// MarshalJSON: a list, as there are many.
func (a answered) MarshalJSON() ([]byte, error) {
	return json.Marshal([]any{hex.EncodeToString(a.key[:]), a.at.UnixMilli(), a.outcome.rejected, a.outcome.message})
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (a *answered) UnmarshalJSON(raw []byte) error {
	var key string
	var at int64
	parts := []any{&key, &at, &a.outcome.rejected, &a.outcome.message}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return err
	}
	hash, err := hex.DecodeString(key)
	if err != nil || len(hash) != len(a.key) || len(parts) != 4 {
		return errors.New("this is no line of a journal of resends")
	}
	a.key, a.at = requestKey(hash), time.UnixMilli(at)
	return nil
}

// journal keeps the answers of the last minutes in files of a folder; they hold hashes, times, counts and reasons. It is not synced, as every
// answer waits for it: it outlives its process, and of a power cut it may lose the last seconds.
type journal struct {
	folder string
	now    func() time.Time

	mu      sync.Mutex
	files   []string
	file    *os.File
	number  int
	entries int
	began   time.Time
}

// openJournal gives a journal, and the answers that were given before, the oldest first. It goes on in a new file, without the lines that
// cannot be read: the end of an old one may be torn, and a bad disk flips bits.
func openJournal(folder string, now func() time.Time, logger *zap.Logger) (*journal, []answered, error) {
	j := &journal{folder: folder, now: now}
	fail := func(err error) (*journal, []answered, error) {
		return nil, nil, fmt.Errorf("cannot use the journal of resends in %s: %w", folder, err)
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fail(err)
	}
	before, err := filepath.Glob(filepath.Join(folder, "*"+journalSuffix))
	if err != nil {
		return fail(err)
	}
	slices.Sort(before)
	var known []answered
	unreadable := 0
	for _, path := range before {
		found, bad, err := readJournal(path, now().Add(-resendTime))
		if err != nil {
			return fail(err)
		}
		known = append(known, found...)
		unreadable += bad
	}
	if unreadable > 0 {
		logger.Warn("lines of the journal of resends cannot be read and are skipped: a resend of their requests is stored again",
			zap.String("folder", folder), zap.Int("lines", unreadable))
	}
	slices.SortStableFunc(known, func(a, b answered) int { return a.at.Compare(b.at) })
	known = known[max(0, len(known)-maxRemembered):]
	if len(before) > 0 {
		_, _ = fmt.Sscanf(filepath.Base(before[len(before)-1]), "%d", &j.number) // a file of another name: begin with 1
	}
	if err := j.add(known...); err != nil {
		return fail(err)
	}
	for _, path := range before {
		if err := os.Remove(path); err != nil {
			j.close()
			return fail(err)
		}
	}
	return j, known, nil
}

// readJournal gives the answers since then, and how many lines cannot be read.
func readJournal(path string, since time.Time) ([]answered, int, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, 0, err
	}
	var found []answered
	unreadable := 0
	for line := range bytes.Lines(raw) {
		var one answered
		_, entry, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
		if !bytes.Equal(line, journalLine(entry)) || json.Unmarshal(entry, &one) != nil {
			unreadable++
		} else if one.at.After(since) {
			found = append(found, one)
		}
	}
	return found, unreadable, nil
}

func journalLine(entry []byte) []byte {
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(entry), entry)
}

// add keeps answers.
func (j *journal) add(all ...answered) error {
	var raw []byte
	for _, one := range all {
		entry, _ := json.Marshal(one) // texts and numbers always encode
		raw = append(raw, journalLine(entry)...)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file == nil || j.entries > maxRemembered/2 || j.now().Sub(j.began) > resendTime {
		if err := j.begin(); err != nil {
			return err
		}
	}
	if _, err := j.file.Write(raw); err != nil {
		j.closeFile() // its end may be torn: the next write begins another
		return err
	}
	j.entries += len(all)
	return nil
}

func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.closeFile()
}

func (j *journal) closeFile() {
	if j.file != nil {
		_ = j.file.Close() // nothing waits to be written
		j.file = nil
	}
}

// begin goes on in another file, and forgets the oldest.
func (j *journal) begin() error {
	j.closeFile()
	for len(j.files) >= journalFiles {
		if err := os.Remove(j.files[0]); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		j.files = j.files[1:]
	}
	path := filepath.Join(j.folder, fmt.Sprintf("%08d%s", j.number+1, journalSuffix))
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	j.number++
	j.files = append(j.files, path)
	j.file, j.entries, j.began = file, 0, j.now()
	return nil
}
