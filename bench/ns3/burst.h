// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What the transports of the burst have in common: the settings, who is a server, and how times are printed.
#pragma once

#include "fabric.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

namespace burst {

struct Settings {
    std::string transport = "dctcp";
    uint64_t piasStep = 10'000;
    uint32_t ndpPackets = 8;
    uint32_t ndpWindow = 207;
    uint32_t hosts = 36;
    uint32_t servers = 0;  // 0: a quarter of the hosts
    uint64_t bytes = 2'700'000;
    std::string buckets;  // in place of `bytes`: see BucketsOf
    double rtoMinUs = 10'000;
    double jitterUs = 0;
    double oversubscription = 1;
    uint32_t initialWindow = 10;
    bool perPacket = false;
    uint32_t seed = 1;
};

inline fabric::Shape ShapeOf(const Settings& settings) {
    fabric::Shape shape;
    const uint32_t leaves = (settings.hosts + 15) / 16;
    shape.hostsPerLeaf = (settings.hosts + leaves - 1) / leaves;
    shape.leaves = (settings.hosts + shape.hostsPerLeaf - 1) / shape.hostsPerLeaf;
    const double needed = static_cast<double>(shape.hostRate) * shape.hostsPerLeaf / shape.spines;
    if (settings.oversubscription > 1) {
        shape.coreRate = static_cast<uint64_t>(needed / settings.oversubscription);
    }
    shape.perPacket = settings.perPacket;
    return shape;
}

// What each worker pushes and pulls at once, and how late it is called for.
struct Bucket {
    uint64_t bytes;
    uint64_t readyNs;
};

// From "bytes@microseconds,bytes@microseconds"; without any: all bytes at once.
inline std::vector<Bucket> BucketsOf(const Settings& settings) {
    std::vector<Bucket> buckets;
    std::istringstream list(settings.buckets);
    for (std::string one; std::getline(list, one, ',');) {
        const size_t at = one.find('@');
        const double late = at == std::string::npos ? 0 : std::stod(one.substr(at + 1));
        buckets.push_back({std::stoull(one), static_cast<uint64_t>(late * 1000)});
    }
    return buckets.empty() ? std::vector<Bucket>{{settings.bytes, 0}} : buckets;
}

inline uint32_t ServersOf(const Settings& settings) {
    return settings.servers > 0 ? settings.servers : std::max(settings.hosts / 4, 1U);
}

// Servers are spread evenly over the racks: with a quarter of the hosts every fourth one.
inline bool IsServer(const Settings& settings, uint32_t host) {
    const uint64_t servers = ServersOf(settings);
    return (host + 1) * servers / settings.hosts > host * servers / settings.hosts;
}

inline void AddTo(ns3::CommandLine& command, Settings& settings) {
    command.AddValue("hosts", "hosts", settings.hosts);
    command.AddValue("servers", "of the hosts; 0: a quarter", settings.servers);
    command.AddValue("bytes", "bytes that each worker pushes and pulls", settings.bytes);
    command.AddValue("buckets", "in place of bytes: bytes@microseconds of each bucket, with commas between", settings.buckets);
    command.AddValue("jitter-us", "workers start so much late at most", settings.jitterUs);
    command.AddValue("oversubscription", "a leaf's hosts have so many times what its uplinks carry", settings.oversubscription);
    command.AddValue("seed", "of every chance", settings.seed);
}

inline void PrintTimes(const char* name, std::vector<double> times) {
    std::sort(times.begin(), times.end());
    const double mean = times.empty() ? 0 : std::accumulate(times.begin(), times.end(), 0.0) / times.size();
    auto at = [&times](double share) {
        const size_t rank = static_cast<size_t>(std::ceil(times.size() * share));
        return times.empty() ? 0 : times[std::max<size_t>(rank, 1) - 1];
    };
    std::printf("\"%s\": {\"count\": %zu, \"mean_us\": %.3f, \"p50_us\": %.3f, \"p99_us\": %.3f, \"p999_us\": %.3f, "
                "\"max_us\": %.3f}, ",
                name, times.size(), mean, at(0.5), at(0.99), at(0.999), at(1));
}

}  // namespace burst
