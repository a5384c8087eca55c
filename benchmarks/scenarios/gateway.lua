-- Requests of wrk: `wrk -s gateway.lua URL -- VERB PREFIX SIZE`. Puts are of new keys.
local get, head, tail, count

function init(arguments)
  local verb, prefix, size = arguments[1], arguments[2], tonumber(arguments[3])
  get = verb == "get" and wrk.format("GET", "/api/get/" .. prefix)
  -- Keys are of one length, so that a request of a megabyte is put together in one step.
  local before, after = '{"key": "' .. prefix, '", "value": "' .. string.rep("v", size) .. '"}'
  head = "PUT /api/put HTTP/1.1\r\nHost: " .. wrk.headers["Host"] .. "\r\nContent-Length: "
    .. #before + 9 + #after .. "\r\n\r\n" .. before
  tail, count = after, 0
end

function request()
  if get then
    return get
  end
  count = count + 1
  return head .. string.format("%09d", count) .. tail
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "seconds": %f, "p50": %f, "p90": %f, "p99": %f, "bad": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6,
    latency:percentile(90) / 1e6, latency:percentile(99) / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
